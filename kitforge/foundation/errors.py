"""The errors that reach people. Every one says what was got, what was expected and what to do.

KitforgeError
├── ConfigError        an option, preset, task or degree that cannot be
├── DataError          input that is missing, empty, unreadable or of the wrong shape
├── ModelError         weights or an architecture that do not fit
├── CheckpointError    a checkpoint that is damaged, foreign or cannot be written
├── TrainingError      a run that cannot go on (a rollback limit, a task that yields nothing)
│   └── PeerError      what a rank has to say of another's failure: a consequence, never the cause
├── EngineError        an engine of inference that failed and cannot go on
├── DeviceError        a device that is absent or cannot do what was asked
└── DependencyError    an optional package that is not installed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KitforgeError(Exception):
    """A problem told in up to four lines: the problem, got, expected, do."""

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
    """An option, preset, task or degree that cannot be."""


class DataError(KitforgeError):
    """Input that is missing, empty, unreadable or of the wrong shape."""


class ModelError(KitforgeError):
    """Weights or an architecture that do not fit."""


class CheckpointError(KitforgeError):
    """A checkpoint that is damaged, foreign or cannot be written."""


class TrainingError(KitforgeError):
    """A run that cannot go on."""


class PeerError(TrainingError):
    """What a rank has to say of another's failure: a consequence, never the cause."""


class EngineError(KitforgeError):
    """An engine of inference that failed and cannot go on."""


class DeviceError(KitforgeError):
    """A device that is absent or cannot do what was asked."""


class DependencyError(KitforgeError):
    """An optional package that is not installed."""

    def __init__(self, package: str, *, needed_for: str, extra: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            fix=f"pip install 'kitforge[{extra}]'",
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """The sentence that names the known word nearest to `name`, or lists all of them when none is near."""
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(words)}"
