"""Lookups that were planned ahead, kept until `forward` is called with the very ids that they were planned for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from kitforge.embedding_cache.pins import LookupHandle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PrefetchedLookup:
    handle: LookupHandle
    version: int  # of the ids' values, so that a change of them is seen
    finalizer: weakref.finalize[[int, LookupHandle], Tensor]


@final
class PrefetchedLookups:
    """Tickets by the tensor of ids. A tensor that is dropped unused gives its ticket back; so does one that changed."""

    def __init__(self, release: Callable[[LookupHandle], None]) -> None:
        """`give_back` is called in whatever thread, at whatever moment a tensor dies."""
        self._lookups: dict[int, deque[_PrefetchedLookup]] = {}
        self._release = release

    def add(self, ids: Tensor, handle: LookupHandle) -> None:
        """Keep the ticket for the next lookup of these ids."""
        finalizer = weakref.finalize(ids, self._discard, id(ids), handle)
        finalizer.atexit = False
        lookup = _PrefetchedLookup(handle=handle, version=_version(ids), finalizer=finalizer)
        self._lookups.setdefault(id(ids), deque()).append(lookup)

    def pop(self, ids: Tensor) -> LookupHandle | None:
        """The ticket for these ids, if there is one; a view of the whole tensor will do that keeps their order."""
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
            self._release(lookup.handle)
            return None
        return lookup.handle

    def outstanding(self) -> list[LookupHandle]:
        """All tickets that wait for their ids."""
        return [lookup.handle for queue in list(self._lookups.values()) for lookup in list(queue)]

    def cancel_all(self) -> None:
        """Give all tickets back."""
        lookups, self._lookups = self._lookups, {}
        for lookup in (claim for queue in lookups.values() for claim in queue):
            lookup.finalizer.detach()
            self._release(lookup.handle)

    def _discard(self, key: int, handle: LookupHandle) -> None:
        queue = self._lookups.get(key)
        kept = deque(lookup for lookup in queue or () if lookup.handle is not handle)
        if kept:
            self._lookups[key] = kept
        else:
            self._lookups.pop(key, None)
        self._release(handle)


def _version(ids: Tensor) -> int:
    return 0 if ids.is_inference() else ids._version
