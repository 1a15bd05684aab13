"""Products of several experts in Triton, each over its own rows, and the zeros behind the last of them.

The ends of the experts' rows stay on the device. A product has a program for each tile that it might need: the tiles of
an expert begin at its first row, so there are at most as many as whole tiles in all rows and one more for each
expert. A program counts the tiles of all experts to find its own.
"""

from __future__ import annotations

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_runtime import device_description, launch_grid, row_block
from kitforge.foundation import device as devices


@final
class Tiles:
    """Rows, columns and depth of the tiles of a product, its warps, the stages of its loads, and how many tiles of
    rows are neighbors in the order of programs."""

    __slots__ = ("options",)

    def __init__(self, rows: int, columns: int, depth: int, warps: int, stages: int, group: int = 8) -> None:
        self.options = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth}
        self.options |= {"num_warps": warps, "num_stages": stages, "GROUP": group}


# Of rows times matrices, and of the gradients of matrices.
ROWS_TILES = Tiles(128, 256, 64, 8, 3)
MATRIX_TILES = Tiles(128, 256, 64, 8, 3)
# In the interpreter.
_SMALL_TILES = Tiles(16, 16, 16, 4, 1, 2)


def zero_past(rows: Tensor, ends: Tensor) -> None:
    """Zeros in the rows [R, width], contiguous, from the last end on; reads and writes nothing else."""
    if rows.numel():
        block = 1024
        # A few programs: most calls have no such row.
        programs = min(triton.cdiv(rows.numel(), block), 264)
        launch_grid(_zero_kernel, programs, block, rows, ends, rows.shape[1], rows.numel(), len(ends), num_warps=4)


def multiply_by_expert(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[R, n]: rows [R, k], contiguous, times matrices [E, k, n] with any strides. Rows past the last end are zero."""
    output = rows.new_empty(len(rows), matrices.shape[2])
    options = _tiles(ROWS_TILES, rows)
    length, width = output.shape
    if not output.numel():
        return output
    across = triton.cdiv(width, options["BLOCK_N"])
    down = triton.cdiv(length, options["BLOCK_M"]) + len(ends)
    with devices.current(rows.device):
        _rows_kernel[(down * across,)](
            *(rows, matrices, output, ends, rows.shape[1], width, *matrices.stride(), len(ends), down, across),
            EXPERTS=row_block(len(ends)),
            EVEN=rows.shape[1] % options["BLOCK_K"] == 0 and width % options["BLOCK_N"] == 0,
            **options,
        )
    zero_past(output, ends)
    return output


def multiply_experts(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """[E, n, k] in that dtype: left [R, n] and right [R, k], both contiguous, as left.T @ right of each expert."""
    (_, width), depth = left.shape, right.shape[1]
    output = left.new_empty(len(ends), width, depth, dtype=dtype)
    options = _tiles(MATRIX_TILES, left)
    if not output.numel():
        return output
    down, across = triton.cdiv(width, options["BLOCK_M"]), triton.cdiv(depth, options["BLOCK_N"])
    options.pop("GROUP")
    with devices.current(left.device):
        _experts_kernel[(len(ends) * down * across,)](
            left, right, output, ends, width, depth, down * across, across, **options
        )
    return output


def _tiles(tiles: Tiles, rows: Tensor) -> dict[str, int]:
    """Options of a launch; the interpreter multiplies no bfloat16."""
    is_small = device_description(rows.device).tile_elements < ROWS_TILES.options["BLOCK_N"]
    return (_SMALL_TILES if is_small else tiles).options | {"WIDEN": not rows.is_cuda}


@triton.jit
def _zero_kernel(rows, ends, width, size, num_experts, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    start = tl.load(ends + num_experts - 1, mask=num_experts > 0, other=0).to(tl.int64) * width
    stride = tl.num_programs(0) * BLOCK
    for first in range(start + tl.program_id(0) * BLOCK, size, stride):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(rows + offsets, tl.zeros((BLOCK,), rows.dtype.element_ty), mask=offsets < size)


@triton.jit
def _rows_kernel(
    rows,
    matrices,
    output,
    ends,
    depth,
    width,
    matrix_stride,
    depth_stride,
    width_stride,
    num_experts,
    down,
    across,
    EXPERTS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Neighbors share their rows and matrices in the cache.
    program = tl.program_id(0)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    within = program % (GROUP * across)
    tile, tile_n = group * GROUP + within % height, within // height
    number = tl.arange(0, EXPERTS)
    is_expert = number < num_experts
    end_of = tl.load(ends + number, mask=is_expert, other=0)
    start_of = tl.load(ends + number - 1, mask=is_expert & (number > 0), other=0)
    tiles = tl.where(is_expert, (end_of - start_of + BLOCK_M - 1) // BLOCK_M, 0)
    until = tl.cumsum(tiles, 0)
    expert = tl.sum((is_expert & (until <= tile)).to(tl.int32), 0)
    if expert < num_experts:
        is_own = number == expert
        end = tl.sum(tl.where(is_own, end_of, 0), 0)
        start = tl.sum(tl.where(is_own, start_of + (tile - until + tiles) * BLOCK_M, 0), 0)
        row = tl.arange(0, BLOCK_M)
        is_row = row < end - start
        # The last rows again in place of those of the next expert.
        source = tl.minimum(start + row, end - 1).to(tl.int64)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < width
        inner = tl.arange(0, BLOCK_K)
        a = rows + source[:, None] * depth + inner[None, :]
        b = matrices + expert.to(tl.int64) * matrix_stride + inner[:, None] * depth_stride
        b += column[None, :] * width_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for done in range(0, depth, BLOCK_K):
            if EVEN:
                x, y = tl.load(a), tl.load(b)
            else:
                is_inner = inner < depth - done
                x = tl.load(a, mask=is_inner[None, :], other=0)
                y = tl.load(b, mask=is_inner[:, None] & is_column[None, :], other=0)
            if WIDEN:
                x, y = x.to(tl.float32), y.to(tl.float32)
            total = tl.dot(x, y, total, input_precision="ieee")
            a += BLOCK_K
            b += BLOCK_K * depth_stride
        target = output + start.to(tl.int64) * width + row[:, None] * width + column[None, :]
        tl.store(target, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _experts_kernel(
    left,
    right,
    output,
    ends,
    width,
    depth,
    tiles,
    across,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    row = (tile // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < width, column < depth
    inner = tl.arange(0, BLOCK_K)
    a = left + start.to(tl.int64) * width + inner[:, None] * width + row[None, :]
    b = right + start.to(tl.int64) * depth + inner[:, None] * depth + column[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(0, end - start, BLOCK_K):
        inside = (inner < end - start - done)[:, None]
        x = tl.load(a, mask=inside & is_row[None, :], other=0)
        y = tl.load(b, mask=inside & is_column[None, :], other=0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
        a += BLOCK_K * width
        b += BLOCK_K * depth
    target = output + expert.to(tl.int64) * width * depth + row[:, None] * depth + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
