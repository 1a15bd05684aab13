"""`embedding_bag_backward` in Triton: ids are sorted by row, and each row sums its gradients in the order of ids.

There are no atomic additions, so the bits do not depend on timing. A row that most ids share is summed by one program.
Indices out of range are left out: naming them would need a synchronization.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.jagged_bags import Bags
from kitforge.core.kernels.triton_math import divide
from kitforge.core.kernels.triton_ops import triton_op
from kitforge.core.kernels.triton_runtime import launch_grid, row_tiles


def embedding_bag_backward(
    gradients: Tensor,
    inverse: Tensor,
    num_rows: int,
    *,
    bags: Bags | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `EmbeddingBagBackwardKernel`."""
    if out is None:
        out = gradients.new_empty(num_rows, gradients.shape[1])
    if bags is None:
        _sum(out, gradients, inverse, None, None, False)
    else:
        _sum(out, gradients, inverse, bags.offsets, bags.weights, bags.mode == "mean")
    return out


@triton_op("kitforge::embedding_bag_backward", mutates_args=("out",))
def _sum(
    out: Tensor,
    gradients: Tensor,
    inverse: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    is_mean: bool,
) -> None:
    num_rows, dim = out.shape
    if not out.numel():
        return
    ascending, ids = torch.sort(inverse, stable=True)
    starts = torch.searchsorted(ascending, torch.arange(num_rows + 1, device=inverse.device))
    owners = ids if offsets is None else torch.bucketize(ids, offsets, right=True) - 1
    features, rows, tiles = row_tiles(out.device, num_rows, dim)
    launch_grid(
        *(_sum_kernel, tiles, rows),
        *(gradients, starts, ids, owners, offsets, weights, out, num_rows, len(gradients), dim),
        *(*gradients.stride(), out.stride(0)),
        num_warps=4,
        FEATURES=features,
        HAS_BAGS=offsets is not None,
        IS_WEIGHTED=weights is not None,
        IS_MEAN=is_mean,
    )


_sum.register_fake(lambda *_: None)


@triton.jit
def _sum_kernel(
    gradients,
    starts,
    ids,
    owners,
    offsets,
    weights,
    out,
    num_rows,
    num_owners,
    dim,
    row_stride,
    column_stride,
    out_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BAGS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        first = tl.load(starts + rows, mask=is_row, other=0)
        count = tl.load(starts + rows + 1, mask=is_row, other=0) - first
        total = tl.zeros((BLOCK, FEATURES), EXACT)
        for index in range(tl.max(count, 0)):
            is_id = index < count
            owner = tl.load(owners + first + index, mask=is_id, other=0)
            is_known = is_id & (owner >= 0) & (owner < num_owners)
            inside = is_known[:, None] & (columns < dim)[None, :]
            offset = owner[:, None] * row_stride + columns[None, :] * column_stride
            x = tl.load(gradients + offset, mask=inside, other=0).to(EXACT)
            if IS_MEAN and HAS_BAGS:
                end = tl.load(offsets + owner + 1, mask=is_known, other=1)
                x = divide(x, (end - tl.load(offsets + owner, mask=is_known, other=0)).to(EXACT)[:, None], EXACT)
            if IS_WEIGHTED:
                number = tl.load(ids + first + index, mask=is_id, other=0)
                x *= tl.load(weights + number, mask=is_known, other=0).to(EXACT)[:, None]
            total += x
        inside = is_row[:, None] & (columns < dim)[None, :]
        tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
