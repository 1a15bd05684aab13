"""The definition of a command-line verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kitforge.foundation.errors import ConfigError

if TYPE_CHECKING:
    from kitforge.kits.kit import AnyKit

INTERRUPTED = 130
# Sections that a verb for a trained model does not use.
TRAINING_SECTIONS = ("trainer", "optimizer", "schedule", "parallel")


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
    # Names of functions, MODULE:NAME, for `imported`.
    compose: str | None = None  # (task, choices) -> Composition
    run: str | None = None  # (Invocation) -> int
    run_plain: str | None = None  # (list of arguments) -> int
    has_ranks: bool = False  # it launches those that its options need
    has_folder: bool = False  # it writes a run, into one folder for all ranks


def imported(name: str) -> Any:
    """The function NAME of kitforge.MODULE. Its module is imported here, so that help and lists go without torch."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"kitforge.{module}"), function)


def require(verb: str, options: Any, examples: Mapping[str, str]) -> None:
    """Raise ConfigError, with an example of each, for options that a verb needs and that have no value."""
    missing = [f"{name}={example}" for name, example in examples.items() if getattr(options, name, None) is None]
    if missing:
        given = [f"{name}={getattr(options, name)}" for name in examples if getattr(options, name, None) is not None]
        got, needed = " ".join(given) or "no such option", "=, ".join(examples)
        raise ConfigError(f"{verb} needs {needed}=", got=got, fix=f"add {' '.join(missing)}")
