"""Rounding to FP8 in Triton: the scale of a whole tensor, then its rows and its columns in one pass.

The products of a linear layer and of its gradients read each operand along another dim, and the matrix units want
that dim contiguous. Largest elements are compared as whole numbers: the order of those is that of the sizes of floats,
with NaN above infinity. What is done twice is reading: the second pass goes from the end of the tensor to its start,
since the end is still in the cache.
"""

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.launcher import RepeatedLaunch
from kitforge.core.kernels.triton.math import divide
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import (
    Kinds,
    device_description,
    grid,
    kinds_of,
    quotient_up,
    repeated_launch,
    row_block,
)

# The lengths of rows that the matrix units multiply are multiples of it.
BLOCK = 16
# Rows and columns of a tile of the kernel for largest elements, and its warps.
TOP_TILE = (4, 2048, 8)
# The same of the kernel that rounds: columns are written down the rows of a tile.
ROUND_TILE = (128, 64, 8)


@triton_op("kitforge::round_to_float8")
def round_to_float8(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`to_float8` of a tensor [m, n] with any strides: rows [m, n] and columns [n, m], both with zeros behind them up
    to a multiple of 16, and the scale."""
    rows, columns, scale = _outputs(tensor, dtype)
    if not tensor.numel():
        rows.view(torch.int8).zero_()
        columns.view(torch.int8).zero_()
        return rows, columns, scale.fill_(_floor(dtype) / torch.finfo(dtype).max)
    top, rounding, programs = _launches(kinds_of(tensor), tensor.shape, tensor.stride(), dtype)
    partial = tensor.new_empty(programs, dtype=torch.int32)
    top(tensor, partial)
    rounding(tensor, partial, rows, columns, scale)
    if tensor.is_cuda and tensor.element_size() > 2:
        # Triton 3.6 writes other columns where it turns numbers that were wider: 4 in 10 differed on an H200.
        numbers = columns.view(torch.int8)
        numbers[:, : len(tensor)] = rows.view(torch.int8)[:, : tensor.shape[1]].t()
        numbers[:, len(tensor) :] = 0
    return rows, columns, scale


@functools.lru_cache(maxsize=1024)
def _launches(
    kinds: Kinds, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> tuple[RepeatedLaunch, RepeatedLaunch, int]:
    """Those of both kernels over a tensor of that shape, and the programs of the first."""
    (num_rows, num_columns), device = shape, kinds[0][1]
    sizes = num_rows, num_columns, *strides
    most = 4 * device_description(device).tile_elements
    down, across, warps = TOP_TILE
    across = min(across, most, row_block(num_columns))
    down = min(down, max(1, most // across))
    tiles, count = _tiles(num_rows, num_columns, down, across)
    (programs,) = grid(device, count)
    top = repeated_launch(_top_kernel, count, down, *sizes, tiles, device=device, WIDTH=across, num_warps=warps)
    down, across, warps = ROUND_TILE
    if down * across > most:
        down = across = BLOCK
    padded = _padded(num_columns), _padded(num_rows)
    tiles, count = _tiles(padded[1], padded[0], down, across)
    rounding = repeated_launch(
        *(_round_kernel, count, down, *sizes, *padded, tiles, count, programs),
        device=device,
        num_warps=warps,
        WIDTH=across,
        PARTIALS=row_block(programs),
        LARGEST=torch.finfo(dtype).max,
        WIDEN=device.type != "cuda",
        FLOOR=int.from_bytes(struct.pack("<f", _floor(dtype)), "little"),
    )
    return top, rounding, programs


def _tiles(num_rows: int, num_columns: int, down: int, across: int) -> tuple[int, int]:
    """How many are side by side, and how many there are."""
    tiles = quotient_up(num_columns, across)
    return tiles, tiles * quotient_up(num_rows, down)


def _padded(length: int) -> int:
    return length + -length % BLOCK


def _floor(dtype: torch.dtype) -> float:
    """The least size that a largest element counts as."""
    return float(torch.finfo(torch.float32).tiny * torch.finfo(dtype).max)


def _outputs(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `round_to_float8`."""
    num_rows, num_columns = tensor.shape
    rows = tensor.new_empty(num_rows, _padded(num_columns), dtype=dtype)
    columns = tensor.new_empty(num_columns, _padded(num_rows), dtype=dtype)
    return rows, columns, tensor.new_empty((), dtype=torch.float32)


round_to_float8.register_fake(_outputs)


@triton.jit
def _top_kernel(
    source,
    partial,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    tiles,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    best = tl.zeros((BLOCK, WIDTH), tl.int32)
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        first_row, first_column = (tile // tiles) * BLOCK, (tile % tiles) * WIDTH
        row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        inside = (row < num_rows - first_row)[:, None] & (column < num_columns - first_column)[None, :]
        corner = source + first_row.to(tl.int64) * row_stride + first_column.to(tl.int64) * column_stride
        x = tl.load(corner + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0)
        best = tl.maximum(best, x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(partial + tl.program_id(0), tl.max(tl.max(best, 1), 0))


@triton.jit
def _nearest(x, IS_E4M3: tl.constexpr):
    """The nearest number of e4m3 or e5m2, in fp32: the interpreter loses the carry of a mantissa that it rounds."""
    bits, least = (3, 121) if IS_E4M3 else (2, 113)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, least)
    step = ((exponent - bits) << 23).to(tl.float32, bitcast=True)
    # The sum has no bits behind the point.
    return (x / step + 12582912.0 - 12582912.0) * step


@triton.jit
def _round_kernel(
    source,
    partial,
    rows,
    columns,
    scale,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    row_length,
    column_length,
    tiles,
    count,
    num_partial,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDEN: tl.constexpr,
):
    number = tl.arange(0, PARTIALS)
    top = tl.max(tl.load(partial + number, mask=number < num_partial, other=FLOOR), 0)
    top = tl.maximum(top, FLOOR).to(tl.float32, bitcast=True)
    size = divide(top, tl.full((), LARGEST, tl.float32), tl.float32)
    factor = divide(tl.full((), 1.0, tl.float32), size, tl.float32)
    if tl.program_id(0) == 0:
        tl.store(scale, size)
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    for step in range(steps):
        # A program without a tile of its own writes what another one writes to the first.
        tile = tl.maximum(count - 1 - (tl.program_id(0) + step * tl.num_programs(0)), 0)
        first_row, first_column = (tile // tiles) * BLOCK, (tile % tiles) * WIDTH
        is_row, is_column = row < num_rows - first_row, column < num_columns - first_column
        corner = source + first_row.to(tl.int64) * row_stride + first_column.to(tl.int64) * column_stride
        inside = is_row[:, None] & is_column[None, :]
        x = tl.load(corner + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0)
        y = x.to(tl.float32) * factor
        if WIDEN:
            y = _nearest(y, LARGEST == 448.0)
        y = y.to(rows.dtype.element_ty)
        # With the zeros behind the rows and columns.
        in_rows = is_row[:, None] & (column < row_length - first_column)[None, :]
        corner = rows + first_row.to(tl.int64) * row_length + first_column
        tl.store(corner + row[:, None] * row_length + column[None, :], y, mask=in_rows)
        in_columns = is_column[:, None] & (row < column_length - first_row)[None, :]
        corner = columns + first_column.to(tl.int64) * column_length + first_row
        tl.store(corner + column[:, None] * column_length + row[None, :], tl.trans(y), mask=in_columns)
