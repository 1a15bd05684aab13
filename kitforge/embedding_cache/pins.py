"""Who needs which rows to stay where they are, and until when.

Every planned lookup has a number and a ticket. Rows are pinned by the highest number that needs them, and a row may
leave only when every lookup up to that number is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from kitforge.core.parallel.table import ExchangePlan


@final
@dataclass(slots=True, kw_only=True, eq=False)
class LookupHandle:
    """Where the rows of one lookup are. It says nothing of their values.

    Legend: N ids of the lookup, u distinct rows that this process must have for it.
    """

    number: int
    keys: Tensor  # [u]
    slots: Tensor  # [u] in the device tier
    inverse: Tensor  # [N] the place of each id among the u; with a route, among the distinct ids asked for here
    is_trained: Tensor | None = None  # [u] the rows that take gradients, known when it is computed; None: all
    exchange: ExchangePlan | None = None  # where the ids of this rank live, when there are several ranks
    is_open: bool = field(default=True)


@final
class PinRegistry:
    """The tickets that are open, and `done`: up to which number all of them are closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, LookupHandle | None] = {}  # by number, in ascending order
        self._next = 0
        self._num_waiting = 0

    def next_number(self) -> int:
        """A number, which counts as open until `close`."""
        with self._changed:
            number, self._next = self._next, self._next + 1
            self._open[number] = None
            return number

    def pin(self, handle: LookupHandle) -> None:
        """The ticket of a number that was given out."""
        with self._changed:
            self._open[handle.number] = handle

    def close(self, number: int) -> None:
        """Nobody needs the rows of that lookup for it any more. It may have been closed before."""
        with self._changed:
            handle = self._open.pop(number, None)
            if handle is not None:
                handle.is_open = False
            self._changed.notify_all()

    @property
    def done(self) -> int:
        """Every lookup up to this number is done."""
        with self._changed:
            return next(iter(self._open), self._next) - 1

    @property
    def num_open(self) -> int:
        """Tickets, and numbers without one yet."""
        with self._changed:
            return len(self._open)

    def open_lookups(self) -> list[LookupHandle]:
        """All that are open."""
        with self._changed:
            return [handle for handle in self._open.values() if handle is not None]

    def wait_until_done_after(self, done: int) -> bool:
        """Wait until more lookups are done than up to that number; False when somebody waits for the planner himself,
        so that no lookup would ever be done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting > 0 or next(iter(self._open), self._next) - 1 > done)
            return next(iter(self._open), self._next) - 1 > done

    @contextmanager
    def trainer_waiting(self) -> Iterator[None]:
        """While the block lasts, the planner must not wait for lookups to be done."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1
