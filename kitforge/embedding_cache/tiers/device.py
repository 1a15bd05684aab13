"""The device tier: the slab in which all arithmetic happens, with the numbers by which its rows are pinned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE, TableKernels, select_table
from kitforge.core.kernels.indexing import at, put
from kitforge.core.kernels.workspace import Workspace
from kitforge.embedding_cache.keys.free_list import grow_rows
from kitforge.embedding_cache.keys.key_map import BaseKeyMap, KeyMap, KeyRegistry, SharedKeyMap
from kitforge.embedding_cache.keys.slot_table import INITIAL_ROOM, SlotTable


@final
class DeviceTier:
    """Rows in slots of one slab [room, width] on a device; which key has which slot is known on the CPU.

    `capacity` is the number of rows it should hold, None for any. Whoever plans moves rows in slots that nobody needs;
    whoever trains reads and moves the values of slots that he needs, and marks them dirty. Only growing concerns both:
    the one who trains stays within `using`.
    """

    def __init__(self, width: int, capacity: int | None, device: torch.device | str) -> None:
        self.capacity = capacity
        self.width = width
        self.device = torch.device(device)
        # Faster loops than the references there are for the CPU only, so far.
        self.kernels: TableKernels = select_table() if self.device.type == "cpu" else TABLE_REFERENCE
        room = INITIAL_ROOM if capacity is None else capacity
        hash_map = select_table().hash_map
        # A tier that may be full shares its keys with the one below, if that is in memory as well.
        self.key_registry = None if capacity is None else KeyRegistry(hash_map, room)
        keys: BaseKeyMap = KeyMap(hash_map, room)
        if self.key_registry is not None:
            keys = SharedKeyMap(self.key_registry, room, is_second=False)
        self.index = SlotTable(keys, room)
        self.slab = torch.empty(room, width, device=self.device)
        self.is_dirty = torch.zeros(room, dtype=torch.bool)
        self.is_fresh = torch.zeros(room, dtype=torch.bool)  # rows that began here and have not moved
        self._growing = threading.RLock()
        self._scratch = Workspace()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def last_use(self) -> Tensor:
        """By slot, the last lookup that needs the row there."""
        return self.index.last_use

    @property
    def num_overflow(self) -> int:
        """Rows beyond the capacity."""
        return 0 if self.capacity is None else max(0, len(self.index) - self.capacity)

    @contextmanager
    def using(self) -> Iterator[Tensor]:
        """The slab, which does not grow while the block lasts."""
        with self._growing:
            yield self.slab

    def make_room(self, num_new: int) -> None:
        """Grow until so many slots are free."""
        short = num_new - self.index.num_free
        if short <= 0:
            return
        before = self.index.room
        # Overflow lasts for a batch or two, so it takes what it needs and a little; a whole table doubles.
        room = max(before + short, 2 * before) if self.capacity is None else before + short + short // 4
        with self._growing:
            slab = torch.empty(room, self.width, device=self.device)
            slab[:before] = self.slab
            self.slab = slab
            self.is_dirty, self.is_fresh = grow_rows(self.is_dirty, room), grow_rows(self.is_fresh, room)
        self.index.grow(room)

    def insert(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> Tensor:
        """Lay down rows [n, width] of keys that are not here, for which there is room; their slots."""
        slots = self.index.add(keys)
        self.kernels.copy_rows(rows.to(self.device, non_blocking=True), self.slab, to=self.to_device(slots))
        put(self.is_dirty, slots, dirty)
        put(self.is_fresh, slots, False)
        return slots

    def evict(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Free slots: the keys, rows and dirty bits that were there. The next call writes over these rows."""
        if self.device.type == "cpu":
            rows = self._scratch.take("leaving", len(slots), self.width)
            self.kernels.copy_rows(self.slab, rows, at=slots)
        else:
            rows = self.rows(slots)
        dirty = at(self.is_dirty, slots)
        put(self.is_fresh, slots, False)
        return self.index.remove(slots), rows, dirty

    def update_counts(self, slots: Tensor) -> Tensor:
        """How often each of these rows has moved, on the CPU."""
        return self.slab.view(torch.int32)[:, -2].index_select(0, self.to_device(slots)).cpu()

    def rows(self, slots: Tensor) -> Tensor:
        """Copies of rows on the CPU."""
        return self.slab.index_select(0, self.to_device(slots)).cpu()

    def to_device(self, positions: Tensor) -> Tensor:
        """Slots or other numbers, on the device."""
        return positions.to(self.device)
