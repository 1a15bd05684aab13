"""The definition of a command-line verb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError
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


def require(verb: str, values: Mapping[str, Any], **examples: str) -> None:
    """Raise ConfigError, with an example of each, for options that a verb needs and that have no value."""
    missing = [f"{name}={example}" for name, example in examples.items() if values.get(name) is None]
    if missing:
        given = [f"{name}={values[name]}" for name in examples if values.get(name) is not None]
        got, needed = " ".join(given) or "no such option", "=, ".join(examples)
        raise ConfigError(f"{verb} needs {needed}=", got=got, fix=f"add {' '.join(missing)}")
