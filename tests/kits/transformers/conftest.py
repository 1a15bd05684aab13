"""One corpus and one thread for all runs of these tests."""

from tests.trainer.conftest import corpus, one_thread

__all__ = ["corpus", "one_thread"]
