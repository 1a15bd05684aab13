"""What a server writes to the log of its process, and how often."""

from __future__ import annotations

import logging
import sys
import time
from typing import final

from kitforge.inference.server.middleware import ACCESS_LOG

# Seconds until a line that any client can cause is written again.
_PAUSE = 60.0


@final
class LogRateLimit(logging.Filter):
    """Lets a line through that has not been written for a while. Those with a traceback of ours always pass."""

    def __init__(self, seconds: float = _PAUSE) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
        # As it is written in the source, without what a client has a part in.
        words = str(record.msg).partition("\n")[0]
        # What asyncio says when descriptors have run out, thousands of times a second.
        is_accept = words.startswith("socket.accept()")
        if record.levelno > logging.WARNING and not is_accept:
            return True
        now = time.monotonic()
        if now < self._last.get(words, -self._seconds) + self._seconds:
            return False
        self._last[words] = now
        return True


_RATE_LIMIT = LogRateLimit()


def limit_log_rate() -> None:
    """Keep clients from filling the log."""
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_RATE_LIMIT)


def write_access_log() -> None:
    """Write the lines of the access log to stderr, where the process has no logging of its own."""
    access = logging.getLogger(ACCESS_LOG)
    access.setLevel(logging.INFO)
    if not access.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        access.addHandler(handler)
