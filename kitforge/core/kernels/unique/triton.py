"""`unique` in Triton by a hash table, whose cells hold positions of ids.

Which of several equal ids takes a cell depends on timing, but the smallest position of each cell does not, and the
numbers of ids follow from those. The result is on the device; its length is read once, as by `torch.unique`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.kernels.triton.hash import KEY_WARPS, SPARE_CELLS, first_cell, key_tiles, table_size
from kitforge.core.kernels.triton.rows import launch_rows
from kitforge.core.kernels.unique import reference

# Of a cell without an id.
_EMPTY = tl.constexpr(2**31 - 1)


def unique(ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None) -> tuple[Tensor, Tensor]:
    if not can_number(ids):
        return reference.unique(ids, out, scratch)
    ids = ids.contiguous()
    firsts, numbers = number_ids(ids)
    distinct = torch.empty_like(ids)
    inverse = out if out is not None and out.is_contiguous() else torch.empty_like(ids)
    tiles = key_tiles(ids.device, len(ids))
    launch_rows(_number_kernel, *tiles, ids, firsts, numbers, distinct, inverse, len(ids), num_warps=KEY_WARPS)
    return distinct[: int(numbers[-1])], inverse if out is None or out is inverse else out.copy_(inverse)


def can_number(ids: Tensor) -> bool:
    """Whether `number_ids` takes these ids."""
    return 0 < len(ids) < 2**31 - 1


def number_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For each position the first one with the same id, and how many distinct ids there are up to it: [N] int32."""
    num_ids = len(ids)
    size, tiles = table_size(num_ids), key_tiles(ids.device, num_ids)
    table = torch.full((size + SPARE_CELLS,), _EMPTY.value, dtype=torch.int32, device=ids.device)
    cells, is_first = (torch.empty(num_ids, dtype=torch.int32, device=ids.device) for _ in range(2))
    spare = SPARE_CELLS - 1
    launch_rows(_insert_kernel, *tiles, ids, table, cells, num_ids, size, spare, num_warps=KEY_WARPS)
    launch_rows(_first_kernel, *tiles, ids, table, cells, is_first, num_ids, num_warps=KEY_WARPS)
    return cells, is_first.cumsum(0, dtype=torch.int32)


@triton.jit
def _insert_kernel(ids, table, cells, num_ids, size, spare, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Leave the smallest position of every id in a cell of its own, and that cell's number for each position."""
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        position = tile * BLOCK + tl.arange(0, BLOCK)
        pending = position < num_ids
        key = tl.load(ids + position, mask=pending, other=0)
        cell = first_cell(key, size - 1).to(tl.int32)
        while tl.max(pending.to(tl.int32), 0) > 0:
            # Most cells are read only: a frequent id finds its own there, with a smaller position.
            held = tl.load(table + cell, mask=pending, other=0, cache_modifier=".cg")
            wants = pending & (held == _EMPTY)
            if tl.max(wants.to(tl.int32), 0) > 0:
                target = tl.where(wants, cell, size + (position & spare))
                before = tl.atomic_cas(table + target, tl.where(wants, _EMPTY, -1), position, sem="relaxed")
                held = tl.where(wants, tl.where(before == _EMPTY, position, before), held)
            # A cell keeps its id, so its position may only become that of an equal one.
            is_found = pending & (tl.load(ids + held, mask=pending, other=0) == key)
            tl.atomic_min(table + cell, position, mask=is_found & (position < held), sem="relaxed")
            tl.store(cells + position, cell, mask=is_found)
            pending = pending & (is_found == 0)
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)


@triton.jit
def _first_kernel(ids, table, cells, is_first, num_ids, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """Whether each position is the first of its id; `cells` become the first positions."""
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        first = tl.load(table + tl.load(cells + position, mask=is_id, other=0), mask=is_id, other=0)
        tl.store(cells + position, first, mask=is_id)
        tl.store(is_first + position, (first == position).to(tl.int32), mask=is_id)


@triton.jit
def _number_kernel(ids, firsts, numbers, distinct, inverse, num_ids, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        position = (tl.program_id(0) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        first = tl.load(firsts + position, mask=is_id, other=-1)
        number = tl.load(numbers + first, mask=is_id, other=1) - 1
        tl.store(inverse + position, number.to(tl.int64), mask=is_id)
        is_first = is_id & (first == position)
        tl.store(distinct + number, tl.load(ids + position, mask=is_first, other=0), mask=is_first)
