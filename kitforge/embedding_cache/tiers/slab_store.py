"""The common part of the host and the file tier: rows in the slots of one slab, and an optional store below."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kitforge.embedding_cache.eviction.policy import LruPolicy
from kitforge.embedding_cache.keys.slot_map import SlotMap
from kitforge.embedding_cache.store import RowStore


class SlabStore(RowStore, ABC):
    """Rows in slots of `_slab` [room, width]. It may stand above another store, to which it spills rows.

    With a `capacity`, the owner keeps the number of rows below it by `spill`.
    """

    def __init__(self, width: int, capacity: int | None, index: SlotMap) -> None:
        self.width, self.capacity = width, capacity
        self._index, self._lru = index, LruPolicy(index)
        self._clock = 0  # numbers the calls that use rows
        self._lock = threading.Lock()
        self._slab = torch.empty(0, width)

    def __len__(self) -> int:
        return len(self._index)

    @abstractmethod
    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """`write`, with the mask [n] of the rows that the store below lacks in this state."""

    @abstractmethod
    def spill(self, num: int, write_below: Callable[[Tensor, Tensor], None]) -> None:
        """Delete the `num` least recently used rows; `write_below` gets those that the store below lacks."""

    def delete(self, keys: Tensor) -> None:
        with self._lock:
            self._index.pop(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        for slots in torch.split(self._index.used(), chunk):
            yield self._index.keys_at(slots), self._slab[slots]

    def keys(self, chunk: int) -> Iterator[Tensor]:
        with self._lock:
            keys = self._index.keys_at(self._index.used())
        return iter(torch.split(keys, chunk))

    def _touch(self, slots: Tensor) -> None:
        """These rows were used. Where no row leaves, nobody asks for that."""
        if self.capacity is not None:
            self._clock += 1
            self._index.touch(slots, self._clock)
