"""Progress of long work: a bar on a terminal, otherwise a line every half minute, which a notebook rewrites."""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from kitforge.foundation.log import console, sanitize

SECONDS_BETWEEN_LINES = 30.0

Item = TypeVar("Item")


class Advance(Protocol):
    """Callback of long work."""

    def __call__(self, done: int, total: int | None = None, /) -> None:
        """Report the amount done, and the total once it is known."""


@contextmanager
def show_progress(label: str, total: int | None = None, *, enabled: bool = True) -> Iterator[Advance]:
    """A callback to report progress with. Short work prints no line; the bar disappears at the end."""
    if not enabled:
        yield lambda _done, _total=None: None
    elif console.is_terminal:
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done, total=None: bar.update(task, completed=done, total=total)
    else:
        yield _Lines(label, total)


def show_line(text: str, console: Console) -> None:
    """A line of progress. A notebook keeps all that is printed, so there it replaces the one before."""
    if console.is_jupyter:
        console.file.write(f"\r{sanitize(text):{console.width}}")
        console.file.flush()
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def heartbeat(items: Iterable[Item], label: str, *, enabled: bool = True) -> Generator[Item]:
    """The items, counted by `show_progress`. Close it where an error may leave it before its end."""
    with show_progress(label, enabled=enabled) as advance:
        for done, item in enumerate(items):
            advance(done)
            yield item


class _Lines:
    """Progress as lines of text, at most one every half minute."""

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
        show_line(f"{self._label}: {done:,}{fraction}", console)
