"""A contract: what is promised, how it is measured, and what the measurement came to."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

SubjectT = TypeVar("SubjectT")
Status: TypeAlias = Literal["held", "broken", "not offered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure that a contract bounds; 0 is equality. NaN breaks it."""

    figure: float
    bound: float = 0.0
    unit: str  # what was counted or compared, in a few words

    @property
    def is_held(self) -> bool:
        """Whether the figure is within its bound."""
        return self.figure <= self.bound


def furthest(figures: Iterable[float], default: float = math.inf) -> float:
    """The largest figure, which `max` does not find beside NaN: one NaN is the furthest. `default` if there is none."""
    return max(figures, key=lambda figure: math.inf if math.isnan(figure) else figure, default=default)


class NotOfferedError(Exception):
    """The subject does not offer what the contract is about; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract(Generic[SubjectT]):
    """A promise that `check` measures on a subject: a configuration, or a trainer of the caller's. It runs in a process
    of its own, and raises NotOfferedError for a subject that the promise is not about."""

    name: str
    promise: str
    check: Callable[[SubjectT], Measured]
    is_of_device: bool = False  # the same for every subject on a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a contract."""

    contract: str
    subject: str
    status: Status
    figure: float | None = None
    bound: float | None = None
    words: str = ""  # the unit of the figure, the reason, or the error
    seconds: float = 0.0


# Verdicts one by one, as they are reached.
Verdicts: TypeAlias = Iterator[Verdict]
