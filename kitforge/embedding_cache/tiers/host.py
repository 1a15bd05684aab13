"""The host tier: rows in main memory, page-locked where a device copies from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels
from kitforge.embedding_cache.coldest import Coldest
from kitforge.embedding_cache.index import FIRST_ROOM, SlotIndex
from kitforge.embedding_cache.store import RowStore
from kitforge.foundation import device as devices


@final
class HostStore(RowStore):
    """Rows in one slab. With a `capacity` its memory is laid down at once, and it is its owner's task to keep to it."""

    def __init__(
        self, width: int, kernels: TableKernels, capacity: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.width = width
        self.capacity = capacity
        self._device = torch.device(device)
        self._lock = threading.Lock()
        room = FIRST_ROOM if capacity is None else capacity
        self._index = SlotIndex(kernels.hash_map, room)
        self._slab = devices.host_memory(self._device, room, width)
        self._dirty = torch.zeros(room, dtype=torch.bool)
        self._written = torch.zeros(room, dtype=torch.int64)  # when, counted in calls
        self._clock = 0
        self._coldest = Coldest()

    def __len__(self) -> int:
        return len(self._index)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        with self._lock:
            return self._copy(keys, out)[0] >= 0

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """See `RowStore`."""
        self.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        return self.take_marked(keys, out)[0]

    def delete(self, keys: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            slots = self._index.lookup(keys)
            self._index.remove(slots[slots >= 0])

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """`write`, with a mask of the rows that no lower tier has as they are."""
        with self._lock:
            slots = self._index.lookup(keys)
            is_new = slots < 0
            num_new = int(is_new.sum())
            self._make_room(num_new)
            if num_new:
                slots[is_new] = self._index.add(keys[is_new])
            self._slab.index_copy_(0, slots, rows)
            self._dirty[slots] = dirty
            self._clock += 1
            self._written[slots] = self._clock

    def take_marked(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """`take`, and the mask [n] of those found that no lower tier has as they are."""
        with self._lock:
            slots, places = self._copy(keys, out)
            dirty = torch.zeros(len(keys), dtype=torch.bool)
            dirty[places] = self._dirty[slots[places]]
            self._index.remove(slots[places])
            return slots >= 0, dirty

    def pop_oldest(self, num: int) -> tuple[Tensor, Tensor]:
        """Let go of the `num` rows that were written first: keys and rows of those that are dirty, as copies."""
        with self._lock:
            slots = self._coldest.pick(self._written, self._index.used, num, lambda slots: self._index.is_used[slots])
            is_dirty = self._dirty[slots]
            rows = self._slab.index_select(0, slots[is_dirty])
            return self._index.remove(slots)[is_dirty], rows

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowStore`."""
        for slots in torch.split(self._index.used(), chunk):
            yield self._index.keys[slots], self._slab[slots]

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """See `RowStore`."""
        with self._lock:
            keys = self._index.keys[self._index.used()]
        return iter(torch.split(keys, chunk))

    def flush(self) -> None:
        """Memory ends with the process."""

    def close(self) -> None:
        """Memory goes when it is dropped."""

    def _copy(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Copy what is there; the slots of all keys and the places of those found."""
        slots = self._index.lookup(keys)
        places = (slots >= 0).nonzero().squeeze(1)
        if len(places) == len(keys):
            torch.index_select(self._slab, 0, slots, out=out)
        else:
            out.index_copy_(0, places, self._slab.index_select(0, slots[places]))
        return slots, places

    def _make_room(self, num_new: int) -> None:
        short = num_new - self._index.num_free
        if short <= 0:
            return
        room = max(2 * self._index.room, self._index.room + short)
        slab = devices.host_memory(self._device, room, self.width)
        slab[: len(self._slab)] = self._slab
        self._slab = slab
        self._dirty = torch.cat([self._dirty, torch.zeros(room - len(self._dirty), dtype=torch.bool)])
        self._written = torch.cat([self._written, torch.zeros(room - len(self._written), dtype=torch.int64)])
        self._index.grow(room)
