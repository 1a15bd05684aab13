"""The host tier: rows in main memory, page-locked where a device copies from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels
from kitforge.core.kernels.indexing import at, put, where
from kitforge.embedding_cache.eviction.lru_queue import LruQueue
from kitforge.embedding_cache.keys.key_map import BaseKeyMap, KeyMap, SharedKeyMap
from kitforge.embedding_cache.keys.slot_table import INITIAL_ROOM, SlotTable
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation import device as devices


@final
class HostStore(RowStore):
    """Rows in one slab. With a `capacity` its memory is laid down at once, and it is its owner's task to keep to it.

    `above` is the tier with which it shares a map of keys; who uses both then does so in one thread at a time.
    """

    def __init__(
        self, width: int, kernels: TableKernels, capacity: int | None = None, above: DeviceTier | None = None
    ) -> None:
        self.width = width
        self.capacity = capacity
        self._device = torch.device("cpu") if above is None else above.device
        self._move_rows = kernels.copy_rows
        self._lock = threading.Lock()
        room = INITIAL_ROOM if capacity is None else capacity
        keys: BaseKeyMap = KeyMap(kernels.hash_map, room)
        if above is not None and above.key_registry is not None:
            keys = SharedKeyMap(above.key_registry, room, is_second=True)
        self._index = SlotTable(keys, room)
        self._slab = devices.host_memory(self._device, room, width)
        self._dirty = torch.zeros(room, dtype=torch.bool)
        self._clock = 0  # of the rows' last use: rows that came
        self._lru_queue = None if capacity is None else LruQueue(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        with self._lock:
            slots = self._index.lookup(keys)
            self._copy(slots, where(slots >= 0), out)
            return slots >= 0

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """See `RowStore`."""
        self.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        return self.take_with_dirty(keys, out)[0]

    def delete(self, keys: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            self._index.pop(keys)

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """`write`, with a mask of the rows that no lower tier has as they are."""
        with self._lock:
            self._make_room(len(keys))
            slots = self._index.add(keys)
            self._move_rows(rows, self._slab, to=slots)
            put(self._dirty, slots, dirty)
            self._touch(slots)

    def exchange(self, positions: Tensor, above: DeviceTier, slots: Tensor) -> None:
        """Rows at `places` [n] here and at `slots` [n] of the tier above change places, whole and in one pass."""
        with self._lock:
            above.index.exchange(slots, self._index, positions)
            above.kernels.swap_rows(above.slab, self._slab, above.to_device(slots), positions)
            dirty = at(above.is_dirty, slots)
            put(above.is_dirty, slots, at(self._dirty, positions))
            put(self._dirty, positions, dirty)
            put(above.is_fresh, slots, False)
            self._touch(positions)

    def take_with_dirty(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """`take`, and the mask [n] of those found that no lower tier has as they are."""
        with self._lock:
            slots = self._index.pop(keys)
            positions = where(slots >= 0)
            self._copy(slots, positions, out)
            dirty = torch.zeros(len(keys), dtype=torch.bool)
            put(dirty, positions, at(self._dirty, at(slots, positions)))
            return slots >= 0, dirty

    def evict_oldest(self, num: int) -> tuple[Tensor, Tensor]:
        """Let go of the `num` rows that were written first: keys and rows of those that are dirty, as copies. Only
        where there is a capacity."""
        assert self._lru_queue is not None
        with self._lock:
            slots = self._lru_queue.pick(num, lambda slots: torch.ones(len(slots), dtype=torch.bool))
            is_dirty = where(at(self._dirty, slots))
            rows = torch.empty(len(is_dirty), self.width)
            self._move_rows(self._slab, rows, at=at(slots, is_dirty))
            return at(self._index.remove(slots), is_dirty), rows

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowStore`."""
        for slots in torch.split(self._index.used(), chunk):
            yield self._index.keys_at(slots), self._slab[slots]

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """See `RowStore`."""
        with self._lock:
            keys = self._index.keys_at(self._index.used())
        return iter(torch.split(keys, chunk))

    def flush(self) -> None:
        """Memory ends with the process."""

    def close(self) -> None:
        """Memory goes when it is dropped."""

    def _touch(self, slots: Tensor) -> None:
        if self._lru_queue is not None:
            self._clock += 1
            self._index.touch(slots, self._clock)

    def _copy(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy what is at slots[places] to these places of `out`."""
        if len(positions) == len(slots):
            self._move_rows(self._slab, out, at=slots)
        else:
            self._move_rows(self._slab, out, at=at(slots, positions), to=positions)

    def _make_room(self, num_new: int) -> None:
        short = num_new - self._index.num_free
        if short <= 0:
            return
        room = max(2 * self._index.room, self._index.room + short)
        slab = devices.host_memory(self._device, room, self.width)
        slab[: len(self._slab)] = self._slab
        self._slab = slab
        self._dirty = torch.cat([self._dirty, torch.zeros(room - len(self._dirty), dtype=torch.bool)])
        self._index.grow(room)
