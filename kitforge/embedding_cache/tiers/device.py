"""The device tier: the slab of rows that lookups and updates work on."""

from __future__ import annotations

import threading
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels, select_table
from kitforge.core.kernels.indexing import at, put
from kitforge.core.kernels.workspace import Workspace
from kitforge.embedding_cache.keys.slot_map import INITIAL_ROOM, SlotMap, grow_rows
from kitforge.foundation.device import CopyStream, copy_to


@final
class DeviceTier:
    """Rows in slots of one slab [room, width] on a device; the key map is on the CPU.

    `capacity` is the number of rows it should hold, None for any. The planning thread moves rows in slots that no
    lookup needs; the training thread reads and updates rows in slots that its lookups need, and marks them dirty. Only
    growing affects both: a thread holds `slab_lock` while it reads or writes the slab. On a GPU rows move on a stream
    of their own, beside the computation of earlier steps.
    """

    def __init__(self, width: int, capacity: int | None, device: torch.device | str) -> None:
        self.capacity, self.width = capacity, width
        self.device = torch.device(device)
        self.kernels: TableKernels = select_table(self.device.type)
        room = INITIAL_ROOM if capacity is None else capacity
        self.index = SlotMap(select_table().hash_map, room)
        self._slab = torch.empty(room, width, device=self.device)
        self._copies = CopyStream(self.device)
        self.slab_lock = threading.RLock()
        self.is_dirty = torch.zeros(room, dtype=torch.bool)
        self.is_fresh = torch.zeros(room, dtype=torch.bool)  # rows initialized here and not updated since
        self._scratch = Workspace()

    @property
    def slab(self) -> Tensor:
        """Rows in their slots [room, width]; computation with them waits for the rows that are on their way."""
        if not self._copies.is_idle:
            self._copies.wait()
        return self._slab

    def make_room(self, num_new: int) -> None:
        """Grow until so many slots are free."""
        short = num_new - self.index.num_free
        if short <= 0:
            return
        before = self.index.room
        # Overflow lasts for a batch or two, so the slab grows by little; without a capacity it doubles.
        room = max(before + short, 2 * before) if self.capacity is None else before + short + short // 4
        with self.slab_lock:
            slab = torch.empty(room, self.width, device=self.device)
            slab[:before] = self.slab
            self._slab = slab
            self.is_dirty, self.is_fresh = grow_rows(self.is_dirty, room), grow_rows(self.is_fresh, room)
        self.index.grow(room)

    def insert(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> Tensor:
        """Insert rows [n, width] of keys that are not here, for which there is room; their slots."""
        slots = self.index.add(keys)
        with self._copies.copying():
            self.kernels.copy_rows(copy_to(rows, self.device), self._slab, to=copy_to(slots, self.device))
        put(self.is_dirty, slots, dirty)
        put(self.is_fresh, slots, False)
        return slots

    def evict(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Free slots; their keys, rows and dirty bits. The next call overwrites these rows."""
        if self.device.type == "cpu":
            rows = self._scratch.take("leaving", len(slots), self.width)
            with self._copies.copying():
                self.kernels.copy_rows(self._slab, rows, at=slots)
        else:
            rows = self.rows(slots)
        dirty = at(self.is_dirty, slots)
        put(self.is_fresh, slots, False)
        return self.index.remove(slots), rows, dirty

    def rows(self, slots: Tensor) -> Tensor:
        """Copies of rows on the CPU."""
        with self._copies.copying():
            return self._slab.index_select(0, copy_to(slots, self.device)).cpu()

    def swap(self, slots: Tensor, other: Tensor, positions: Tensor) -> None:
        """Swap the rows at `slots` [n] with those at `positions` [n] of a slab on the CPU."""
        with self._copies.copying():
            self.kernels.swap_rows(self._slab, other, copy_to(slots, self.device), positions)
