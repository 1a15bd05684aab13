"""Wishes to end a run that come from outside: Ctrl-C, and what a cluster sends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Signals that follow one another faster than a person repeats a wish.
SAME_REQUEST_SECONDS = 0.5


@contextmanager
def interrupt_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Within the block SIGINT and SIGTERM call `interrupt`; a second one ends the process at once.

    One request may come twice, from a terminal or a cluster and again from what started the ranks.
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
        # Only the main thread may set handlers; a run inside another thread is stopped by its owner.
        before.clear()
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
