"""Pins: which lookups still need their rows, so that these rows are not evicted.

Every planned lookup has a number. A row is pinned by the highest number that needs it, and may be evicted when every
lookup up to that number is done.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.core.parallel.table import ExchangePlan

_NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class LookupHandle:
    """Where the rows of one lookup are; it holds no values.

    Legend: N ids of the lookup, u distinct rows that this process needs for it.
    """

    keys: Tensor  # [u]
    # [N] the position of each id among the u, on the device of the rows; with an exchange, among the distinct ids asked
    # for here
    inverse: Tensor
    exchange: ExchangePlan | None  # where the ids of this rank live, when there are several ranks
    number: int = -1
    # [u], empty until it is planned: where it is planned, and on the device of the rows.
    slots: Tensor = _NO_SLOTS
    device_slots: Tensor = _NO_SLOTS
    is_trained: Tensor | None = None  # [u] the rows that take gradients, known when it is computed; None: all
    is_open: bool = True


class PinRegistry:
    """The open lookups in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, LookupHandle] = {}  # by number, ascending
        self._next = 0
        self._num_waiting = 0

    def open(self, handle: LookupHandle) -> None:
        """Number a lookup. It is open until `close`."""
        with self._changed:
            handle.number, self._next = self._next, self._next + 1
            self._open[handle.number] = handle

    def close(self, number: int) -> None:
        """The lookup no longer needs its rows. May be called again."""
        with self._changed:
            handle = self._open.pop(number, None)
            if handle is not None:
                handle.is_open = False
            self._changed.notify_all()

    @property
    def done(self) -> int:
        """The highest number up to which every lookup is done."""
        with self._changed:
            return next(iter(self._open), self._next) - 1

    def open_lookups(self) -> list[LookupHandle]:
        """All open lookups."""
        with self._changed:
            return list(self._open.values())

    def wait_until_done_after(self, done: int) -> bool:
        """Wait until a lookup after `done` is done. Returns False if the trainer waits for the planner, which would be
        a deadlock."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting > 0 or self.done > done)
            return self.done > done

    @contextmanager
    def trainer_waiting(self) -> Iterator[None]:
        """Within the block the planner must not wait for lookups to be done."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PrefetchedLookup:
    handle: LookupHandle
    version: int  # of the values of the ids, to detect a change
    finalizer: weakref.finalize[[int, LookupHandle], Tensor]


class PrefetchedLookups:
    """Lookups planned ahead, by the tensor of ids that `forward` will be called with.

    A lookup is closed when its tensor dies unused or has changed by then.
    """

    def __init__(self, close: Callable[[int], None]) -> None:
        """`close` takes the number of a lookup; it is called in any thread, whenever a tensor dies."""
        self._lookups: dict[int, deque[_PrefetchedLookup]] = {}
        self._close = close

    def add(self, ids: Tensor, handle: LookupHandle) -> None:
        """Keep the lookup for the next `forward` of these ids."""
        finalizer = weakref.finalize(ids, self._discard, id(ids), handle)
        finalizer.atexit = False
        lookup = _PrefetchedLookup(handle=handle, version=_version(ids), finalizer=finalizer)
        self._lookups.setdefault(id(ids), deque()).append(lookup)

    def pop(self, ids: Tensor) -> LookupHandle | None:
        """The lookup for these ids, if there is one. A view of all the same ids in the same order finds it too."""
        key, base = id(ids), ids._base
        if key not in self._lookups and base is not None and base.numel() == ids.numel():
            # Of as many numbers in the same memory, contiguous ones are in the same order; a transposed view is not.
            key = id(base) if ids.is_contiguous() and base.is_contiguous() else key
        queue = self._lookups.get(key)
        if not queue:
            return None
        lookup = queue.popleft()
        if not queue:
            del self._lookups[key]
        lookup.finalizer.detach()
        if lookup.version != _version(ids):
            self._close(lookup.handle.number)
            return None
        return lookup.handle

    def cancel_all(self) -> None:
        """Close all lookups."""
        lookups, self._lookups = self._lookups, {}
        for lookup in (each for queue in lookups.values() for each in queue):
            lookup.finalizer.detach()
            self._close(lookup.handle.number)

    def _discard(self, key: int, handle: LookupHandle) -> None:
        queue = self._lookups.pop(key, deque[_PrefetchedLookup]())
        kept = deque(lookup for lookup in queue if lookup.handle is not handle)
        if kept:
            self._lookups[key] = kept
        self._close(handle.number)


def _version(ids: Tensor) -> int:
    return 0 if ids.is_inference() else ids._version
