"""The definition of a command-line verb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kitforge.composition import Composition
from kitforge.kits.kit import AnyKit

INTERRUPTED = 130
# Sections that a verb for a trained model does not use.
TRAINING_SECTIONS = ("trainer", "optimizer", "schedule", "parallel")

# The options of a run, from its task and what was chosen on the command line.
Compose: TypeAlias = Callable[[str, Mapping[str, Any]], Composition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A verb's composed options, read once."""

    kit: AnyKit
    options: Any
    values: Mapping[str, Any]  # the options as plain values
    model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A verb. It takes composed options or plain arguments, and returns the exit status."""

    purpose: str  # what it does, in a few words
    example: str  # a whole command line
    arguments: tuple[str, ...] = ()  # of a verb without options, one line each
    compose: Compose | None = None
    run: Callable[[Invocation], int] | None = None
    run_plain: Callable[[list[str]], int] | None = None
    # Options of its ranks besides those typed. None: it never launches ranks.
    rank_options: Callable[[Invocation], dict[str, str]] | None = None
