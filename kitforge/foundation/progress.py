"""Shows how far long work has come: a bar on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, final

from rich.progress import Progress

from kitforge.foundation.log import console

SECONDS_BETWEEN_LINES = 30.0

Item = TypeVar("Item")


class Advance(Protocol):
    """What long work calls as it advances."""

    def __call__(self, done: int, total: int | None = None, /) -> None:
        """How much is done, and how much there is in all once that is known."""


@contextmanager
def show_progress(label: str, total: int | None = None, *, enabled: bool = True) -> Iterator[Advance]:
    """A function to call as the work advances. Short work leaves no line, and the bar goes when the work ends."""
    if not enabled:
        yield lambda _done, _total=None: None
    elif console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done, total=None: bar.update(task, completed=done, total=total)
    else:
        yield _Lines(label, total)


def heartbeat(items: Iterable[Item], label: str, *, enabled: bool = True) -> Iterator[Item]:
    """The items, with a line about their number every half minute off a terminal, where other bars may be drawn."""
    lines = _Lines(label, None) if enabled and not console.is_terminal else None
    for done, item in enumerate(items):
        if lines is not None:
            lines(done)
        yield item


@final
class _Lines:
    """Lines in the place of a bar."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label = label
        self._total = total
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int | None = None, /) -> None:
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        whole = total or self._total
        fraction = f" of {whole:,} ({done / whole:.0%})" if whole else ""
        console.print(f"{self._label}: {done:,}{fraction}", markup=False, highlight=False, soft_wrap=True)
