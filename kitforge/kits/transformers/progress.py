"""Shows how far tokenising has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

from kitforge.foundation.log import console


@contextmanager
def tokenising(enabled: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A function to tell bytes done and bytes in all; nothing is shown off a terminal or when disabled."""
    if not enabled or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("tokenising", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
