"""The device tier: the slab of rows that lookups and updates work on."""

import threading

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels, select_table
from kitforge.core.kernels.hash_map.reference import HashMapKernel
from kitforge.core.kernels.tables.indexing import at, put
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.embedding_cache.keys.slot_map import INITIAL_ROOM, SlotMap, grow_rows
from kitforge.foundation.device import CopyStream, copy_to, host_memory


class DeviceTier:
    """Rows in slots of one slab [room, width] on a device. The key map is on the CPU, with `has_key_map` there as well.

    `capacity` is the number of rows it should hold, None for any. The planning thread moves rows in slots that no
    lookup needs; the training thread reads and updates rows in slots that its lookups need, and marks them dirty. Only
    growing affects both: a thread holds `slab_lock` while it reads or writes the slab. On a GPU rows move on a stream
    of their own, beside the computation of earlier steps.
    """

    def __init__(
        self, width: int, capacity: int | None, device: torch.device | str, *, has_key_map: bool = False
    ) -> None:
        self.capacity, self.width = capacity, width
        self.device = torch.device(device)
        self.kernels: TableKernels = select_table(self.device.type)
        room = INITIAL_ROOM if capacity is None else capacity
        # Finds slots without the CPU; None: lookups are planned on the CPU.
        self.key_map: HashMapKernel | None = self.kernels.hash_map() if has_key_map else None
        copy = None if self.key_map is None else (self.key_map, self.device)
        self.index = SlotMap(select_table().hash_map, room, copy=copy)
        self._slab = torch.empty(room, width, device=self.device)
        self._copies = CopyStream(self.device)
        self.slab_lock = threading.RLock()
        self.is_dirty = torch.zeros(room, dtype=torch.bool)
        # Rows initialized here and not updated since; it lies where lookups are planned.
        self._is_fresh = torch.zeros(room, dtype=torch.bool, device=self.device if has_key_map else "cpu")
        self._swap_here = select_table().swap_rows
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
            self.is_dirty, self._is_fresh = grow_rows(self.is_dirty, room), grow_rows(self._is_fresh, room)
        self.index.grow(room)

    def insert(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> Tensor:
        """Insert rows [n, width] of keys that are not here, for which there is room; their slots."""
        slots = self.index.add(keys)
        with self._copies.copying():
            self.kernels.copy_rows(copy_to(rows, self.device), self._slab, to=copy_to(slots, self.device))
        put(self.is_dirty, slots, dirty)
        self.mark_fresh(slots, False)
        return slots

    def mark_fresh(self, slots: Tensor, is_fresh: bool) -> None:
        """Whether the rows at `slots` [n] were initialized here and not updated since."""
        if self._is_fresh.is_cpu:
            put(self._is_fresh, slots, is_fresh)
        else:
            self._is_fresh.index_fill_(0, copy_to(slots, self.device), is_fresh)

    def are_fresh(self, slots: Tensor) -> Tensor:
        """The mask [n] of the rows at `slots` [n], on the CPU, that were initialized here and not updated since."""
        if self._is_fresh.is_cpu:
            return at(self._is_fresh, slots)
        return self._is_fresh.index_select(0, copy_to(slots, self.device)).cpu()

    def evict(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Free slots; their keys, rows and dirty bits. The next call overwrites these rows."""
        if self.device.type == "cpu":
            rows = self._scratch.take("leaving", len(slots), self.width)
            with self._copies.copying():
                self.kernels.copy_rows(self._slab, rows, at=slots)
        else:
            rows = self.rows(slots)
        dirty = at(self.is_dirty, slots)
        self.mark_fresh(slots, False)
        return self.index.remove(slots), rows, dirty

    def rows(self, slots: Tensor) -> Tensor:
        """Copies of rows on the CPU."""
        with self._copies.copying():
            return self._slab.index_select(0, copy_to(slots, self.device)).cpu()

    def swap(self, slots: Tensor, other: Tensor, positions: Tensor) -> None:
        """Swap the rows at `slots` [n] with those at `positions` [n] of a slab on the CPU."""
        with self._copies.copying():
            if self.device.type == "cpu":
                self.kernels.swap_rows(self._slab, other, slots, positions)
                return
            there = copy_to(slots, self.device)
            rows = host_memory(self.device, len(slots), self.width)
            rows.copy_(self._slab.index_select(0, there))
            self._swap_here(rows, other, torch.from_numpy(np.arange(len(slots))), positions)
            self.kernels.copy_rows(copy_to(rows, self.device), self._slab, to=there)
