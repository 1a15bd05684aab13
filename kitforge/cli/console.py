"""Messages and errors on the terminal, through the sanitizing consoles of `foundation.log`."""

import os
from types import TracebackType

from rich.markup import escape

from kitforge.core.parallel.rank_errors import describe_error, explain, report_error
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation.log import errors


def is_main_process() -> bool:
    """Whether this process prints: the only one, or rank 0."""
    where = launch_info()
    return where is None or where.rank == 0


def print_error(_kind: type[BaseException], error: BaseException, _traceback: TracebackType | None) -> None:
    """Print an error without traceback. A launched rank reports it to its launcher instead."""
    error = explain(error) or error
    words = describe_error(error)
    if report_error(error, words):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and "WORLD_SIZE" in os.environ else ""
        errors.print(f"[bold red]error:[/] {rank}{escape(words)}", highlight=False, soft_wrap=True)
