"""Lookups that were planned ahead, kept until `forward` is called with the very ids that they were planned for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from kitforge.embedding_cache.tickets import Ticket


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Claim:
    ticket: Ticket
    version: int  # of the ids' values, so that a change of them is seen
    finalizer: weakref.finalize[[int, Ticket], Tensor]


@final
class Claims:
    """Tickets by the tensor of ids. A tensor that is dropped unused gives its ticket back; so does one that changed."""

    def __init__(self, give_back: Callable[[Ticket], None]) -> None:
        """`give_back` is called in whatever thread, at whatever moment a tensor dies."""
        self._claims: dict[int, deque[_Claim]] = {}
        self._give_back = give_back

    def add(self, ids: Tensor, ticket: Ticket) -> None:
        """Keep the ticket for the next lookup of these ids."""
        finalizer = weakref.finalize(ids, self._forget, id(ids), ticket)
        finalizer.atexit = False
        claim = _Claim(ticket=ticket, version=_version(ids), finalizer=finalizer)
        self._claims.setdefault(id(ids), deque()).append(claim)

    def take(self, ids: Tensor) -> Ticket | None:
        """The ticket for these ids, if there is one; a view of the whole tensor will do that keeps their order."""
        key, base = id(ids), ids._base
        if key not in self._claims and base is not None and base.numel() == ids.numel():
            # Of as many numbers in the same memory, contiguous ones are in the same order; a transposed view is not.
            key = id(base) if ids.is_contiguous() and base.is_contiguous() else key
        queue = self._claims.get(key)
        if not queue:
            return None
        claim = queue.popleft()
        if not queue:
            del self._claims[key]
        claim.finalizer.detach()
        if claim.version != _version(ids):
            self._give_back(claim.ticket)
            return None
        return claim.ticket

    def outstanding(self) -> list[Ticket]:
        """All tickets that wait for their ids."""
        return [claim.ticket for queue in list(self._claims.values()) for claim in list(queue)]

    def drop(self) -> None:
        """Give all tickets back."""
        claims, self._claims = self._claims, {}
        for claim in (claim for queue in claims.values() for claim in queue):
            claim.finalizer.detach()
            self._give_back(claim.ticket)

    def _forget(self, key: int, ticket: Ticket) -> None:
        queue = self._claims.get(key)
        kept = deque(claim for claim in queue or () if claim.ticket is not ticket)
        if kept:
            self._claims[key] = kept
        else:
            self._claims.pop(key, None)
        self._give_back(ticket)


def _version(ids: Tensor) -> int:
    return 0 if ids.is_inference() else ids._version
