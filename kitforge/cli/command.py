"""What a verb of the command line is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kitforge.composition import Composition

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command. It either takes options, which are composed, or plain arguments. Its result is the exit status."""

    help: str  # one line of help
    run: Callable[[Composition], int] | None = None
    run_plain: Callable[[list[str]], int] | None = None
    is_launched: bool = False  # several ranks can do it together
    generates_text: bool = False  # what it opens continues text, whichever stage trained it
    ignored_sections: tuple[str, ...] = ()  # sections of options that it has no use for
    measures_run: bool = False  # begins with the options that the run under checkpoint= wrote down
    starts_run: bool = False  # makes a run folder, whose name is decided once for all ranks
    serves: bool = False  # by the kit of the run where it has a service, else as what continues text
    predicts: bool = False  # a row for a row: scores and items, or continued texts
