"""`embedding_bag_backward` in Triton: ids are sorted by row, and each row sums its gradients in the order of ids.

There are no atomic additions, so the bits do not depend on timing. A row of more than `SEGMENT` ids is summed in parts,
one for each segment of the sorted ids, and then over its parts: a row that most ids share keeps all programs busy.
Indices out of range are left out: naming them would need a synchronization.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.triton.math import divide
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.rows import TILE_ELEMENTS, launch_rows, tile_of_rows, unroll_of
from kitforge.core.kernels.triton.runtime import quotient_up

# Sorted ids of a part. Rows of so many ids at most have the bits of the reference.
SEGMENT = 32


def embedding_bag_backward(
    gradients: Tensor, inverse: Tensor, num_rows: int, *, bags: Bags | None = None, out: Tensor | None = None
) -> Tensor:
    if out is None:
        out = gradients.new_empty(num_rows, gradients.shape[1])
    if bags is None:
        _sum(out, gradients, inverse, None, None, False)
    else:
        _sum(out, gradients, inverse, bags.offsets, bags.weights, bags.mode == "mean")
    return out


@triton_op("kitforge::embedding_bag_backward", mutates_args=("out",))
def _sum(
    out: Tensor, gradients: Tensor, inverse: Tensor, offsets: Tensor | None, weights: Tensor | None, is_mean: bool
) -> None:
    num_rows, dim = out.shape
    if not out.numel():
        return
    # Half the digits sort in half the time.
    narrow = inverse.to(torch.int32) if max(num_rows, len(inverse)) < 2**31 - 1 else inverse
    ascending, ids = torch.sort(narrow, stable=True)
    rows = torch.arange(num_rows + 1, dtype=narrow.dtype, device=narrow.device)
    starts = torch.searchsorted(ascending, rows, out_int32=narrow.dtype == torch.int32)
    owners = ids if offsets is None else torch.bucketize(ids, offsets, right=True) - 1
    features, block, tiles = tile_of_rows(out.device, num_rows, dim)
    given = starts, ids, owners, offsets, weights
    sizes = len(gradients), dim, *gradients.stride()
    constants = {
        "FEATURES": features,
        "UNROLL": unroll_of(features),
        "SEGMENT": SEGMENT,
        "HAS_BAGS": offsets is not None,
        "IS_WEIGHTED": weights is not None,
        "IS_MEAN": is_mean,
    }
    launch_rows(_sum_kernel, tiles, block, gradients, *given, out, num_rows, *sizes, out.stride(0), **constants)
    if len(inverse) <= SEGMENT:
        return
    exact = torch.float64 if gradients.dtype == torch.float64 else torch.float32
    segments = quotient_up(len(inverse), SEGMENT)
    parts = torch.empty(segments, 2, dim, dtype=exact, device=out.device)
    of = num_rows, len(inverse), segments
    launch_rows(
        *(_part_kernel, quotient_up(segments, block), block, gradients, ascending, *given, parts, *of, *sizes),
        **constants,
    )
    block = max(1, TILE_ELEMENTS // features)
    strides = dim, out.stride(0)
    launch_rows(
        *(_merge_kernel, segments, block, parts, ascending, starts, out, num_rows, len(inverse), *strides),
        FEATURES=features,
        SEGMENT=SEGMENT,
    )


_sum.register_fake(lambda *_: None)


@triton.jit
def _gradient(
    gradients,
    ids,
    owners,
    offsets,
    weights,
    location,
    is_id,
    columns,
    num_owners,
    dim,
    row_stride,
    column_stride,
    EXACT: tl.constexpr,
    HAS_BAGS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """The contributions [BLOCK, FEATURES] of the sorted ids at `location` [BLOCK]; zero where not `is_id`."""
    owner = tl.load(owners + location, mask=is_id, other=0)
    is_known = is_id & (owner >= 0) & (owner < num_owners)
    inside = is_known[:, None] & (columns < dim)[None, :]
    offset = owner[:, None] * row_stride + columns[None, :] * column_stride
    x = tl.load(gradients + offset, mask=inside, other=0).to(EXACT)
    if IS_MEAN and HAS_BAGS:
        end = tl.load(offsets + owner + 1, mask=is_known, other=1)
        x = divide(x, (end - tl.load(offsets + owner, mask=is_known, other=0)).to(EXACT)[:, None], EXACT)
    if IS_WEIGHTED:
        number = tl.load(ids + location, mask=is_id, other=0)
        x *= tl.load(weights + number, mask=is_known, other=0).to(EXACT)[:, None]
    return x


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
    UNROLL: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_BAGS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """The rows of at most `SEGMENT` ids, each from all its ids."""
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        first = tl.load(starts + rows, mask=is_row, other=0)
        count = tl.load(starts + rows + 1, mask=is_row, other=0) - first
        is_row = is_row & (count <= SEGMENT)
        count = tl.where(is_row, count, 0)
        total = tl.zeros((BLOCK, FEATURES), EXACT)
        for begin in range(0, tl.max(count, 0), UNROLL):
            for offset in tl.static_range(UNROLL):
                index = begin + offset
                total += _gradient(
                    *(gradients, ids, owners, offsets, weights, first + index, index < count, columns),
                    *(num_owners, dim, row_stride, column_stride, EXACT, HAS_BAGS, IS_WEIGHTED, IS_MEAN),
                )
        inside = is_row[:, None] & (columns < dim)[None, :]
        tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _part_kernel(
    gradients,
    ascending,
    starts,
    ids,
    owners,
    offsets,
    weights,
    parts,
    num_rows,
    num_ids,
    num_segments,
    num_owners,
    dim,
    row_stride,
    column_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_BAGS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_MEAN: tl.constexpr,
):
    """Of each segment the sums for the row that it begins with, and for the one that it ends with, if these are rows
    of more than `SEGMENT` ids: no other such row has ids here."""
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        segment = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        is_segment = segment < num_segments
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, num_ids)
        head = tl.load(ascending + begin, mask=is_segment, other=-1)
        is_head = (head >= 0) & (head < num_rows)
        stop = tl.load(starts + head + 1, mask=is_head, other=0)
        is_head = is_head & (stop - tl.load(starts + head, mask=is_head, other=0) > SEGMENT)
        stop = tl.where(is_head, tl.minimum(stop, end), begin)
        tail = tl.load(ascending + end - 1, mask=is_segment, other=-1)
        is_tail = (tail >= 0) & (tail < num_rows) & (tail != head)
        start = tl.load(starts + tail, mask=is_tail, other=0)
        is_tail = is_tail & (tl.load(starts + tail + 1, mask=is_tail, other=0) - start > SEGMENT)
        start = tl.where(is_tail, start, end)
        one = tl.zeros((BLOCK, FEATURES), EXACT)
        other = tl.zeros((BLOCK, FEATURES), EXACT)
        for first in range(0, tl.max(tl.where(is_head | is_tail, SEGMENT, 0), 0), UNROLL):
            for offset in tl.static_range(UNROLL):
                location = begin + first + offset
                is_one = location < stop
                is_other = (location >= start) & (location < end)
                x = _gradient(
                    *(gradients, ids, owners, offsets, weights, location, is_segment & (is_one | is_other), columns),
                    *(num_owners, dim, row_stride, column_stride, EXACT, HAS_BAGS, IS_WEIGHTED, IS_MEAN),
                )
                one += tl.where(is_one[:, None], x, 0.0)
                other += tl.where(is_other[:, None], x, 0.0)
        inside = (columns < dim)[None, :]
        to = parts + 2 * dim * segment[:, None] + columns[None, :]
        tl.store(to, one, mask=(is_segment & is_head)[:, None] & inside)
        tl.store(to + dim, other, mask=(is_segment & is_tail)[:, None] & inside)


@triton.jit
def _merge_kernel(
    parts,
    ascending,
    starts,
    out,
    num_rows,
    num_ids,
    dim,
    out_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """The rows of more ids, from their parts: each by the segment in which it begins, whose last row it is."""
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        segment = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        begin = segment * SEGMENT
        row = tl.load(ascending + tl.minimum(begin + SEGMENT, num_ids) - 1, mask=begin < num_ids, other=-1)
        is_row = (row >= 0) & (row < num_rows)
        start = tl.load(starts + row, mask=is_row, other=0).to(tl.int64)
        stop = tl.load(starts + row + 1, mask=is_row, other=0).to(tl.int64)
        if (stop - start > SEGMENT) & (start >= begin):
            total = tl.zeros((BLOCK, FEATURES), EXACT)
            for first in range(segment, (stop - 1) // SEGMENT + 1, BLOCK):
                part = first + tl.arange(0, BLOCK)
                # The row is the last of the segment that it begins amid, and the first of those that follow.
                is_last = (part == segment) & (start > begin)
                inside = (part <= (stop - 1) // SEGMENT)[:, None] & (columns < dim)[None, :]
                at = (2 * part + is_last.to(tl.int64)) * dim
                total += tl.load(parts + at[:, None] + columns[None, :], mask=inside, other=0)
            result = tl.sum(total, 0).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * out_stride + columns, result, mask=columns < dim)
