"""SIGINT and SIGTERM end a run after its current step."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Signals within this time count as one request.
SAME_REQUEST_SECONDS = 0.5


@contextmanager
def interrupt_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM call `interrupt`; a second signal ends the process at once.

    One request may arrive twice: from the terminal or the cluster, and from the launcher of the ranks.
    """
    asked: list[float] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if asked and time.monotonic() - asked[0] > SAME_REQUEST_SECONDS:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        asked.append(time.monotonic())
        interrupt()

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    except ValueError:
        # Only the main thread may set signal handlers.
        before.clear()
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
