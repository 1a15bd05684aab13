"""`copy_rows` in Triton: rows are read and written once, without a gathered copy.

Between devices the rows are gathered where they are and copied without waiting. An index out of range copies nothing:
naming it would need a synchronization.
"""

import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.copy_rows import reference
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.rows import COPY_ELEMENTS, COPY_WARPS, launch_rows
from kitforge.core.kernels.triton.runtime import device_description, quotient_up, row_block
from kitforge.foundation.errors import ModelError


def copy_rows(source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> None:
    num_rows, num_targets = len(source if at is None else at), len(target if to is None else to)
    if num_rows != num_targets:
        reference.require_rows(source, target, None if at is None else at[:0], None if to is None else to[:0])
        raise ModelError("rows cannot be copied", got=f"{num_rows} rows to {num_targets} targets", expected="as many")
    if source.device != target.device:
        rows = source if at is None else source.index_select(0, at)
        source, at = rows.to(target.device, non_blocking=True), None
    _copy(target, source, at, to)


@triton_op("kitforge::copy_rows", mutates_args=("target",))
def _copy(target: Tensor, source: Tensor, at: Tensor | None, to: Tensor | None) -> None:
    num_rows, dim = len(source if at is None else at), target.shape[1]
    if not num_rows * dim:
        return
    rows = max(1, min(COPY_ELEMENTS, 16 * device_description(target.device).row_elements) // dim)
    launch_rows(
        *(_copy_kernel, quotient_up(num_rows, rows), row_block(rows * dim)),
        *(source, target, at, to, num_rows, len(source), len(target), source.stride(0), target.stride(0)),
        num_warps=COPY_WARPS,
        ROWS=rows,
        DIM=dim,
        HAS_AT=at is not None,
        HAS_TO=to is not None,
    )


_copy.register_fake(lambda *_: None)


@triton.jit
def _copy_kernel(
    source,
    target,
    at,
    to,
    num_rows,
    source_rows,
    target_rows,
    source_stride,
    target_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_AT: tl.constexpr,
    HAS_TO: tl.constexpr,
):
    # The elements of a tile lie densely in its lanes, whatever the width of a row.
    location = tl.arange(0, BLOCK)
    column = location % DIM
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * ROWS + location // DIM
        is_row = (rows < num_rows) & (location < ROWS * DIM)
        origin, goal = rows, rows
        if HAS_AT:
            origin = tl.load(at + rows, mask=is_row, other=-1)
        if HAS_TO:
            goal = tl.load(to + rows, mask=is_row, other=-1)
        is_row = is_row & (origin >= 0) & (origin < source_rows) & (goal >= 0) & (goal < target_rows)
        x = tl.load(source + origin * source_stride + column, mask=is_row, other=0)
        tl.store(target + goal * target_stride + column, x, mask=is_row)
