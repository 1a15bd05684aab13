"""One thread: these networks are too small to share out."""

from tests.core.nn.conftest import one_thread

__all__ = ["one_thread"]
