"""One thread for all runs of these tests."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
