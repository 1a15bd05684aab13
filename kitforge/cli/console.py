"""What reaches people: messages as they stand and errors in words. The consoles of `foundation.log` sanitize both."""

from __future__ import annotations

import os
from types import TracebackType

from rich.markup import escape

from kitforge.core.parallel.rank_errors import describe_error, explain, report
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation.log import console, errors


def is_main_process() -> bool:
    """Whether this process talks to people: alone, or as the first of several ranks."""
    where = launch_info()
    return where is None or where.rank == 0


def say(text: str) -> None:
    """A message as it stands: no colours, nothing read as markup, lines as long as they are."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_error(_kind: type[BaseException], error: BaseException, _traceback: TracebackType | None) -> None:
    """What reaches a person in the place of a traceback; a rank that was started by another process tells that one."""
    error = explain(error) or error
    words = describe_error(error)
    if report(error, words):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and "WORLD_SIZE" in os.environ else ""
        errors.print(f"[bold red]error:[/] {rank}{escape(words)}", highlight=False, soft_wrap=True)
