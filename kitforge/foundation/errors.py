"""Exceptions for users: the problem, what was got, what was expected, what to do.

KitforgeError
├── ConfigError        an invalid option, preset, task or parallel degree
│   └── ContextLengthError  a prompt and its completion that are longer than the model or its cache
├── DataError          input that is missing, empty, unreadable or of the wrong shape
├── ModelError         weights or an architecture that do not match
├── CheckpointError    a checkpoint that is damaged, of another format or cannot be written
├── TrainingError      a run that cannot continue (gradients that are not finite, a task without batches)
│   └── PeerError      the failure of another rank, as this rank reports it; never the cause
├── EngineError        a failed inference engine
├── DeviceError        an absent device, or an operation that it does not support
└── DependencyError    a package that is not installed
"""

import difflib
import functools
from collections.abc import Iterable
from typing import Any


class KitforgeError(Exception):
    """A message of up to four lines: the problem, got, expected, do."""

    def __init__(self, problem: str, *, got: object = None, expected: object = None, fix: str | None = None) -> None:
        lines = [problem]
        if got is not None:
            lines.append(f"  got:      {got}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if fix is not None:
            lines.append(f"  do:       {fix}")
        super().__init__("\n".join(lines))


class ConfigError(KitforgeError):
    """An invalid option, preset, task or parallel degree."""


class ContextLengthError(ConfigError):
    """A prompt and its completion that are longer than the model or its cache."""


class DataError(KitforgeError):
    """Input that is missing, empty, unreadable or of the wrong shape."""


class ModelError(KitforgeError):
    """Weights or an architecture that do not match."""


class CheckpointError(KitforgeError):
    """A checkpoint that is damaged, of another format or cannot be written."""


class TrainingError(KitforgeError):
    """A run that cannot continue."""


class PeerError(TrainingError):
    """The failure of another rank, as this rank reports it; never the cause."""


class EngineError(KitforgeError):
    """A failed inference engine."""


class DeviceError(KitforgeError):
    """An absent device, or an operation that it does not support."""


class DependencyError(KitforgeError):
    """A package that is not installed."""

    def __init__(self, package: str, *, needed_for: str, extra: str | None) -> None:
        problem = f"{needed_for} needs the package {package!r}, which is not installed"
        super().__init__(problem, fix=installation(package, extra))
        self._arguments: dict[str, Any] = {"package": package, "needed_for": needed_for, "extra": extra}

    def __reduce__(self) -> tuple[Any, ...]:
        """By its arguments, as a copy or another process makes it again."""
        return functools.partial(DependencyError, **self._arguments), ()


def installation(package: str, extra: str | None) -> str:
    """The command that installs a package: by its extra, or alone if it is a required one."""
    return f"pip install {package}" if extra is None else f"pip install 'kitforge[{extra}]'"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the known name closest to `name`, or the list of all names if none is close."""
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(words)}"
