"""`hash_map` in Triton: keys and slots lie on the device, and so do the results.

A cell holds slot + 1, or 0 if it is empty, or -1 if its key was removed, which leaves it behind until the table is made
anew; with its key it takes 12 bytes. Keys of a call are distinct, so an insertion claims an empty cell by compare and
swap and need not look at those that others claim. Slots are below 2**31 - 1.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import FoundIds, found_among
from kitforge.core.kernels.triton.hash import KEY_WARPS, SPARE_CELLS, first_cell, key_tiles, table_size
from kitforge.core.kernels.triton.rows import launch_rows
from kitforge.core.kernels.unique.triton import can_number, number_ids, unique

# In a cell; the kernels spell out that an empty one holds 0.
_REMOVED = -1


class DeviceHashMap:
    """See `HashMapKernel`. The map is on the device of the first keys that are inserted."""

    def __init__(self, room: int = 0) -> None:
        self._room = room
        # Cells that are not empty, at most: an insertion does not wait for the number of its keys that are new.
        self._num_used = 0
        self._new_table(torch.device("cpu"), 0)

    def _new_table(self, device: torch.device, size: int) -> None:
        self._keys = torch.zeros(size, dtype=torch.int64, device=device)
        # With spare cells behind the table; those are never full.
        self._cells = torch.zeros(size + SPARE_CELLS, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return int((self._cells > 0).sum())

    def lookup(self, keys: Tensor, marks: Tensor | None = None, mark: int = 0) -> Tensor:
        slots = self._slots_in(self._find(keys))
        if marks is not None:
            marks[slots[slots >= 0]] = mark
        return slots

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        if not len(keys):
            return torch.empty_like(keys)
        self._make_room(keys.device, len(keys))
        # All keys are found before any cell is claimed: a claimed cell is full before its key is written.
        cells = self._find(keys)
        before = self._slots_in(cells)
        self._claim(keys, cells, slots.contiguous())
        self._num_used += len(keys)
        return before

    def replace(self, keys: Tensor, slots: Tensor) -> None:
        self.insert(keys, slots)

    def remove(self, keys: Tensor) -> Tensor:
        cells = self._find(keys)
        before = self._slots_in(cells)
        if self._num_used:
            # Missing keys end behind the table.
            self._cells[torch.where(cells < 0, len(self._keys), cells)] = _REMOVED
        return before

    def items(self) -> tuple[Tensor, Tensor]:
        cells = self._cells[: len(self._keys)]
        is_full = cells > 0
        keys, order = self._keys[is_full].sort()
        return keys, cells[is_full][order].long() - 1

    def find_distinct(self, ids: Tensor, bound: int | None = None) -> FoundIds:
        if not can_number(ids):
            return found_among(self, *unique(ids), bound)
        ids = ids.contiguous()
        firsts, numbers = number_ids(ids)
        keys, inverse, slots = (torch.empty_like(ids) for _ in range(3))
        counts = torch.zeros(3, dtype=torch.int32, device=ids.device)
        # A map without keys may be on another device; its size is then 0, and nothing of it is read.
        table = (self._keys, self._cells) if self._num_used else (ids, firsts)
        self._launch(
            *(_find_distinct_kernel, ids, firsts, numbers, *table, keys, inverse, slots, counts),
            number=2**63 - 1 if bound is None else bound,
            HAS_KEYS=self._num_used > 0,
            HAS_BOUND=bound is not None,
        )
        num_keys, num_missing, num_outside = counts.tolist()
        return FoundIds(
            keys=keys[:num_keys],
            inverse=inverse,
            slots=slots[:num_keys],
            num_missing=num_missing,
            num_outside=num_outside,
        )

    def _find(self, keys: Tensor) -> Tensor:
        """The cell of each key [n], -1 for a missing one."""
        cells = torch.full_like(keys, -1)
        # A map without keys may be on another device.
        if len(keys) and self._num_used:
            self._launch(_find_kernel, keys, self._keys, self._cells, cells)
        return cells

    def _slots_in(self, cells: Tensor) -> Tensor:
        """The slots in cells [n], -1 where the cell is -1."""
        # A map without keys may be on another device.
        return torch.where(cells < 0, -1, self._cells[cells.clamp(min=0)].long() - 1) if self._num_used else cells

    def _make_room(self, device: torch.device, num_keys: int) -> None:
        """Make the table anew, on the device of the keys, where it would be more than three quarters full."""
        is_elsewhere, size = self._num_used == 0 and self._keys.device != device, len(self._keys)
        if not is_elsewhere and 4 * (self._num_used + num_keys) <= 3 * size:
            return
        keys, slots = self.items()
        self._new_table(device, table_size(max(len(keys) + num_keys, self._room)))
        self._num_used = len(keys)
        if len(keys):
            missing = torch.full_like(keys, -1)
            self._claim(keys, missing, slots)

    def _claim(self, keys: Tensor, cells: Tensor, slots: Tensor) -> None:
        """Write keys [n] and slots [n] to their cells [n]; -1: to an empty one."""
        self._launch(_claim_kernel, keys, cells, slots, self._keys, self._cells, number=SPARE_CELLS - 1)

    def _launch(
        self, kernel: Any, keys: Tensor, *tensors: Tensor, number: int | None = None, **constants: bool
    ) -> None:
        tiles = key_tiles(keys.device, len(keys))
        numbers = len(keys), len(self._keys), *(() if number is None else (number,))
        launch_rows(kernel, *tiles, keys.contiguous(), *tensors, *numbers, num_warps=KEY_WARPS, **constants)


@triton.jit
def _find_kernel(wanted, keys, cells, found, num_keys, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_key = position < num_keys
        key = tl.load(wanted + position, mask=is_key, other=0)
        cell = first_cell(key, size - 1)
        pending = is_key
        while tl.max(pending.to(tl.int32), 0) > 0:
            held = tl.load(cells + cell, mask=pending, other=0)
            is_found = pending & (held > 0) & (tl.load(keys + cell, mask=pending, other=0) == key)
            tl.store(found + position, cell, mask=is_found)
            pending = pending & (held != 0) & ~is_found
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)


@triton.jit
def _find_distinct_kernel(
    ids,
    firsts,
    numbers,
    keys,
    cells,
    distinct,
    inverse,
    slots,
    counts,
    num_ids,
    size,
    bound,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):
    """Number each id, and look up the first one of each number."""
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        key = tl.load(ids + position, mask=is_id, other=0)
        first = tl.load(firsts + position, mask=is_id, other=-1)
        number = tl.load(numbers + first, mask=is_id, other=1) - 1
        tl.store(inverse + position, number.to(tl.int64), mask=is_id)
        is_first = is_id & (first == position)
        tl.store(distinct + number, key, mask=is_first)
        slot = tl.full((BLOCK,), -1, tl.int64)
        if HAS_KEYS:
            cell = first_cell(key, size - 1)
            pending = is_first
            while tl.max(pending.to(tl.int32), 0) > 0:
                held = tl.load(cells + cell, mask=pending, other=0)
                is_found = pending & (held > 0) & (tl.load(keys + cell, mask=pending, other=0) == key)
                slot = tl.where(is_found, held.to(tl.int64) - 1, slot)
                pending = pending & (held != 0) & ~is_found
                cell = tl.where(pending, (cell + 1) & (size - 1), cell)
        tl.store(slots + number, slot, mask=is_first)
        tl.atomic_add(counts, tl.sum(is_first.to(tl.int32), 0))
        tl.atomic_add(counts + 1, tl.sum((is_first & (slot < 0)).to(tl.int32), 0))
        if HAS_BOUND:
            tl.atomic_add(counts + 2, tl.sum((is_id & ((key < 0) | (key >= bound))).to(tl.int32), 0))


@triton.jit
def _claim_kernel(
    wanted, known, given, keys, cells, num_keys, size, spare, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr
):
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_key = position < num_keys
        key = tl.load(wanted + position, mask=is_key, other=0)
        value = (tl.load(given + position, mask=is_key, other=0) + 1).to(tl.int32)
        own = tl.load(known + position, mask=is_key, other=0)
        tl.store(cells + own, value, mask=is_key & (own >= 0))
        pending = is_key & (own < 0)
        cell = first_cell(key, size - 1)
        while tl.max(pending.to(tl.int32), 0) > 0:
            wants = pending & (tl.load(cells + cell, mask=pending, other=1) == 0)
            # No cell holds -2.
            target = tl.where(wants, cell, size + (position & spare))
            held = tl.atomic_cas(cells + target, tl.where(wants, 0, -2), value, sem="relaxed")
            is_mine = wants & (held == 0)
            tl.store(keys + cell, key, mask=is_mine)
            pending = pending & ~is_mine
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)
