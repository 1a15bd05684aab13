"""`embedding_bag` in Triton: from the slab to the output in one pass, in the order of ids, so the bits do not depend on
timing.

A slot or an index out of range gives NaN: naming it would need a synchronization.
"""

import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.kernels.triton.math import divide
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.rows import launch_rows, tile_of_rows, unroll_of


def embedding_bag(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    *,
    inverse: Tensor | None = None,
    bags: Bags | None = None,
    out: Tensor | None = None,
    scratch: Workspace | None = None,
) -> Tensor:
    del scratch
    num_ids = len(slots if inverse is None else inverse)
    if out is None:
        out = slab.new_empty(num_ids if bags is None else bags.num_bags, dim)
    if bags is None:
        _pool(out, slab, slots, inverse, None, None, False)
    else:
        _pool(out, slab, slots, inverse, bags.offsets, bags.weights, bags.mode == "mean")
    return out


@triton_op("kitforge::embedding_bag", mutates_args=("out",))
def _pool(
    out: Tensor,
    slab: Tensor,
    slots: Tensor,
    inverse: Tensor | None,
    offsets: Tensor | None,
    weights: Tensor | None,
    is_mean: bool,
) -> None:
    num_rows, dim = out.shape
    if not out.numel():
        return
    num_ids = len(slots if inverse is None else inverse)
    features, rows, tiles = tile_of_rows(slab.device, num_rows, dim)
    launch_rows(
        *(_pool_kernel, tiles, rows),
        *(slab, slots, inverse, offsets, weights, out, num_rows, num_ids, len(slots), len(slab), dim),
        *(slab.stride(0), out.stride(0)),
        FEATURES=features,
        UNROLL=unroll_of(features) if offsets is not None else 1,
        HAS_INVERSE=inverse is not None,
        HAS_BAGS=offsets is not None,
        IS_WEIGHTED=weights is not None,
        IS_MEAN=is_mean,
    )


_pool.register_fake(lambda *_: None)


@triton.jit
def _pool_kernel(
    slab,
    slots,
    inverse,
    offsets,
    weights,
    out,
    num_rows,
    num_ids,
    num_slots,
    slab_rows,
    dim,
    slab_stride,
    out_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_BAGS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        first, count = rows, is_row.to(tl.int64)
        if HAS_BAGS:
            first = tl.load(offsets + rows, mask=is_row, other=0)
            count = tl.load(offsets + rows + 1, mask=is_row, other=0) - first
        total = tl.zeros((BLOCK, FEATURES), EXACT)
        for begin in range(0, tl.max(count, 0), UNROLL):
            # Unrolled, so that the loads of several rows are on their way before the first is added.
            for offset in tl.static_range(UNROLL):
                is_id = begin + offset < count
                number = first + begin + offset
                is_known = is_id & (number >= 0) & (number < num_ids)
                slot = number
                if HAS_INVERSE:
                    slot = tl.load(inverse + number, mask=is_known, other=0)
                    is_known = is_known & (slot >= 0) & (slot < num_slots)
                slot = tl.load(slots + slot, mask=is_known, other=0)
                is_known = is_known & (slot >= 0) & (slot < slab_rows)
                inside = is_known[:, None] & (columns < dim)[None, :]
                x = tl.load(slab + slot[:, None] * slab_stride + columns[None, :], mask=inside, other=0).to(EXACT)
                x = tl.where((is_id & (is_known == 0))[:, None], float("nan"), x)
                if IS_WEIGHTED:
                    x *= tl.load(weights + number, mask=is_known, other=0).to(EXACT)[:, None]
                total += x
        if IS_MEAN:
            total = divide(total, tl.maximum(count, 1).to(EXACT)[:, None], EXACT)
        inside = is_row[:, None] & (columns < dim)[None, :]
        tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
