"""The host tier: rows in main memory, page-locked where a device copies from it."""

from collections.abc import Callable

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels
from kitforge.core.kernels.tables.indexing import at, put, where
from kitforge.embedding_cache.keys.slot_map import INITIAL_ROOM, SlotMap, grow_rows
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.slab_store import SlabStore
from kitforge.foundation import device as devices


class HostStore(SlabStore):
    """Rows in one slab. With a `capacity` its memory is allocated at once, and the owner must keep to it.

    `above` is the device tier, with which it shares a key map if that is bounded; then both are used in one thread at a
    time.
    """

    def __init__(
        self, width: int, kernels: TableKernels, capacity: int | None = None, above: DeviceTier | None = None
    ) -> None:
        room = INITIAL_ROOM if capacity is None else capacity
        first = None if above is None or above.capacity is None else above.index
        super().__init__(width, capacity, SlotMap(kernels.hash_map, room, first))
        self._device = torch.device("cpu") if above is None else above.device
        self._copy_rows, self._swap_rows = kernels.copy_rows, kernels.swap_rows
        self._slab = devices.host_memory(self._device, room, width)
        self._dirty = torch.zeros(room, dtype=torch.bool)

    @property
    def slab(self) -> Tensor:
        """Rows in their slots [room, width]."""
        return self._slab

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        with self._lock:
            slots = self._index.lookup(keys)
            self._copy(slots, where(slots >= 0), out)
            return slots >= 0

    def write(self, keys: Tensor, rows: Tensor) -> None:
        self.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        with self._lock:
            short = len(keys) - self._index.num_free
            if short > 0:
                self.grow(max(2 * self._index.room, self._index.room + short))
            slots = self._index.add(keys)
            self._copy_rows(rows, self._slab, to=slots)
            put(self._dirty, slots, dirty)
            self._touch(slots)

    def exchange(self, positions: Tensor, above: DeviceTier, slots: Tensor) -> None:
        """Swap the rows at `positions` [n] here with those at `slots` [n] of the tier above, in one pass."""
        with self._lock:
            above.index.exchange(slots, self._index, positions)
            above.swap(slots, self._slab, positions)
            self._swap_rows(above.is_dirty.unsqueeze(1), self._dirty.unsqueeze(1), slots, positions)
            above.mark_fresh(slots, False)
            self._touch(positions)

    def take(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """`read`, and delete the rows found: the hits [n], and the mask [n] of those that the store below lacks in this
        state."""
        with self._lock:
            slots = self._index.pop(keys)
            positions = where(slots >= 0)
            self._copy(slots, positions, out)
            dirty = torch.zeros(len(keys), dtype=torch.bool)
            put(dirty, positions, at(self._dirty, at(slots, positions)))
            return slots >= 0, dirty

    def spill(self, num: int, write_below: Callable[[Tensor, Tensor], None]) -> None:
        """See `SlabStore`. The last use of a row is its last write."""
        with self._lock:
            slots = self._lru.victims(num, lambda slots: torch.ones(len(slots), dtype=torch.bool))
            is_dirty = where(at(self._dirty, slots))
            rows = torch.empty(len(is_dirty), self.width)
            self._copy_rows(self._slab, rows, at=at(slots, is_dirty))
            keys = at(self._index.remove(slots), is_dirty)
        write_below(keys, rows)

    def _copy(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy the rows at slots[positions] to out[positions]."""
        if len(positions) == len(slots):
            self._copy_rows(self._slab, out, at=slots)
        else:
            self._copy_rows(self._slab, out, at=at(slots, positions), to=positions)

    def grow(self, room: int) -> None:
        """Have room for so many rows in all."""
        slab = devices.host_memory(self._device, room, self.width)
        slab[: len(self._slab)] = self._slab
        self._slab, self._dirty = slab, grow_rows(self._dirty, room)
        self._index.grow(room)
