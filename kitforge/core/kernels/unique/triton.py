"""`unique` in Triton by a hash table, whose cells hold positions of ids.

Which of several equal ids takes a cell depends on timing, but the smallest position of each cell does not, and the
numbers of ids follow from those. The result is on the device; its length is read once, as by `torch.unique`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_hash import first_cell, key_tiles, table_size
from kitforge.core.kernels.triton_runtime import launch_grid
from kitforge.core.kernels.unique import reference
from kitforge.core.kernels.workspace import Workspace


def unique(ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None) -> tuple[Tensor, Tensor]:
    """See `UniqueKernel`."""
    num_ids = len(ids)
    if not 0 < num_ids < 2**31:
        return reference.unique(ids, out, scratch)
    ids, size = ids.contiguous(), table_size(num_ids)
    # 0 is empty, else a position from 1 on; behind the table, a cell for lanes without work.
    table = torch.zeros(size + 1, dtype=torch.int32, device=ids.device)
    first = torch.full((size,), num_ids, dtype=torch.int32, device=ids.device)
    cells = torch.empty_like(ids)
    launch_grid(_number_kernel, *key_tiles(ids.device, num_ids), ids, table, first, cells, num_ids, size)
    firsts = first[cells].long()
    is_first = firsts == torch.arange(num_ids, device=ids.device)
    numbers = is_first.cumsum(0).sub_(1)
    inverse = numbers[firsts]
    return ids[is_first], inverse if out is None else out.copy_(inverse)


@triton.jit
def _number_kernel(ids, table, first, cells, num_ids, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        position = tile * BLOCK + tl.arange(0, BLOCK)
        is_id = position < num_ids
        key = tl.load(ids + position, mask=is_id, other=0)
        cell = first_cell(key, size - 1)
        pending = is_id
        while tl.max(pending.to(tl.int32), 0) > 0:
            # Compare and swap has no mask: a lane without work looks at the cell behind the table, which is never -1.
            target = tl.where(pending, cell, size)
            held = tl.atomic_cas(table + target, tl.where(pending, 0, -1), position + 1)
            other = tl.load(ids + held - 1, mask=pending & (held > 0), other=0)
            is_found = pending & ((held == 0) | (other == key))
            tl.atomic_min(first + target, position, mask=is_found)
            tl.store(cells + position, cell, mask=is_found)
            pending = pending & ~is_found
            cell = tl.where(pending, (cell + 1) & (size - 1), cell)
