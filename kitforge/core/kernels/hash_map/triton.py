"""`hash_map` in Triton: keys and slots lie on the device, and so do the results.

A cell is empty, full, or was full: a removed key leaves its cell behind until the table is made anew. Keys of a call
are distinct, so an insertion claims an empty cell by compare and swap and need not look at those that others claim.
"""

from __future__ import annotations

from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_hash import KEY_WARPS, SPARE_CELLS, first_cell, key_tiles, table_size
from kitforge.core.kernels.triton_rows import launch_rows

# The states of cells; the kernels spell them out, where an empty one is 0.
_FULL, _REMOVED = 1, 2


@final
class DeviceHashMap:
    """See `HashMapKernel`. The map is on the device of the first keys that are inserted."""

    def __init__(self, room: int = 0) -> None:
        self._room = room
        # Cells that are not empty, at most: an insertion does not wait for the number of its keys that are new.
        self._num_used = 0
        self._new_table(torch.device("cpu"), 0)

    def _new_table(self, device: torch.device, size: int) -> None:
        self._keys = torch.zeros(size, dtype=torch.int64, device=device)
        self._slots = torch.zeros(size, dtype=torch.int64, device=device)
        # With spare cells behind the table; those are never full.
        self._states = torch.zeros(size + SPARE_CELLS, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return int((self._states == _FULL).sum())

    def lookup(self, keys: Tensor, out: Tensor | None = None, through: Tensor | None = None) -> Tensor:  # noqa: D102
        slots = self._at(self._find(keys), self._slots)
        slots = slots if through is None else self._at(slots, through)
        return slots if out is None else out.copy_(slots)

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:  # noqa: D102
        if not len(keys):
            return torch.empty_like(keys)
        self._make_room(keys.device, len(keys))
        # All keys are found before any cell is claimed: a claimed cell is full before its key is written.
        cells = self._find(keys)
        before = self._at(cells, self._slots)
        self._claim(keys, cells, slots.contiguous())
        self._num_used += len(keys)
        return before

    def remove(self, keys: Tensor) -> Tensor:  # noqa: D102
        cells = self._find(keys)
        before = self._at(cells, self._slots)
        if self._num_used:
            # Missing keys end behind the table.
            self._states[torch.where(cells < 0, len(self._keys), cells)] = _REMOVED
        return before

    def items(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        is_full = self._states[: len(self._keys)] == _FULL
        keys, order = self._keys[is_full].sort()
        return keys, self._slots[is_full][order]

    def _find(self, keys: Tensor) -> Tensor:
        """The cell of each key [n], -1 for a missing one."""
        cells = torch.full_like(keys, -1)
        # A map without keys may be on another device.
        if len(keys) and self._num_used:
            self._launch(_find_kernel, keys, self._keys, self._states, cells)
        return cells

    @staticmethod
    def _at(indices: Tensor, source: Tensor) -> Tensor:
        """`source[indices]`, -1 where the index is."""
        return torch.where(indices < 0, -1, source[indices.clamp(min=0)]) if len(source) else indices

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
        self._launch(_claim_kernel, keys, cells, slots, self._keys, self._slots, self._states, more=(SPARE_CELLS - 1,))

    def _launch(self, kernel: Any, keys: Tensor, *tensors: Tensor, more: tuple[int, ...] = ()) -> None:
        tiles = key_tiles(keys.device, len(keys))
        sizes = len(keys), len(self._keys)
        launch_rows(kernel, *tiles, keys.contiguous(), *tensors, *sizes, *more, num_warps=KEY_WARPS)


@triton.jit
def _find_kernel(wanted, keys, states, cells, num_keys, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_key = position < num_keys
        key = tl.load(wanted + position, mask=is_key, other=0)
        cell = first_cell(key, size - 1)
        pending = is_key
        while tl.max(pending.to(tl.int32), 0) > 0:
            state = tl.load(states + cell, mask=pending, other=0)
            held = tl.load(keys + cell, mask=pending, other=0)
            is_found = pending & (state == 1) & (held == key)
            tl.store(cells + position, cell, mask=is_found)
            pending = pending & (state != 0) & ~is_found
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)


@triton.jit
def _claim_kernel(
    wanted,
    cells,
    given,
    keys,
    slots,
    states,
    num_keys,
    size,
    spare,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_key = position < num_keys
        key = tl.load(wanted + position, mask=is_key, other=0)
        known = tl.load(cells + position, mask=is_key, other=0)
        pending = is_key & (known < 0)
        cell = tl.where(pending, first_cell(key, size - 1), known)
        while tl.max(pending.to(tl.int32), 0) > 0:
            wants = pending & (tl.load(states + cell, mask=pending, other=1) == 0)
            # A state is never -1.
            target = tl.where(wants, cell, size + (position & spare))
            held = tl.atomic_cas(states + target, tl.where(wants, 0, -1), tl.full((BLOCK,), 1, tl.int32), sem="relaxed")
            is_mine = wants & (held == 0)
            tl.store(keys + cell, key, mask=is_mine)
            pending = pending & ~is_mine
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)
        tl.store(slots + cell, tl.load(given + position, mask=is_key, other=0), mask=is_key)
