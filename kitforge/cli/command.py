"""The definition of a command-line verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kitforge.composition import Composition

INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A verb. It takes composed options or plain arguments, and returns the exit status."""

    purpose: str  # what it does, in a few words
    example: str  # a whole command line
    arguments: tuple[str, ...] = ()  # of a verb without options, one line each
    run: Callable[[Composition], int] | None = None
    run_plain: Callable[[list[str]], int] | None = None
    is_launched: bool = False  # runs on several ranks
    generates_text: bool = False  # opens the model for text generation, whichever task trained it
    ignored_sections: tuple[str, ...] = ()  # option sections that it does not use
    measures_run: bool = False  # starts from the recorded options of the run checkpoint=
    starts_run: bool = False  # creates a run folder, named once for all ranks
    serves: bool = False  # served by the kit of the run if it has a service, else as text generation
    predicts: bool = False  # batch inference: scores, items or generated texts
