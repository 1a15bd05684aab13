"""Quantized weights for the compiled step of a decoder: panels of whole numbers, widened while they are multiplied.

An output depends on its own row alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, PANEL
from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, array_at, compiled_fastmath, float32_at
from kitforge.core.kernels.cpu_engine.vectors import LANES, vector_at, write_vector
from kitforge.core.kernels.linear.numba import LINE, empty_lines, write_sums
from kitforge.core.kernels.quantized_linear.dequantizing_microkernel import LINE_SHAPE, multiply_dequantized
from kitforge.core.kernels.quantized_linear.reference import GROUP, Blocks, whole_numbers
from kitforge.core.kernels.quantized_linear.widening_microkernel import (
    CHUNK,
    ZERO,
    QuantizedPanel,
    line_shape,
    numbers_per_word,
    quantized_tile,
    widening,
)

# Rows that are multiplied with a panel while it is widened; for more, it is widened first.
FEW_ROWS = 16
# Rows of a tile.
_TILE_ROWS = 12


def layout_of(blocks: Blocks) -> int:
    """Bits of a number, plus 32 where a group of features has a scale, and 16 more where that is kept as float16."""
    bits, scales = 4 if blocks.whole.dtype == torch.uint8 else 8, _kept(blocks.scales)
    return bits + 16 * (scales.dtype is torch.float16) + 32 * (scales.shape[1] > 1)


def _kept(scales: Tensor) -> Tensor:
    """Scales as they are packed: those of whole rows are few."""
    return scales if scales.shape[1] > 1 else scales.float()


def pack_blocks(weights: list[Blocks], itemsize: int, has_tiles: bool) -> tuple[Tensor, list[int]]:
    """Memory with weights [out, in] packed for rows of this element size, and the address of each.

    Of a panel and a group of features, first the scales [`PANEL`], then the words of a panel in order, of
    `numbers_per_word`. In int4 line by line: the first word has the first number of each vector, the first vector's in
    the lowest bits, the second word the second of each, and so on."""
    sizes = [-(-_packed_bytes(each) // LINE) * LINE for each in weights]
    memory = empty_lines(sum(sizes))
    parts = torch.split(memory, sizes)
    per_word = numbers_per_word(itemsize)
    shape = LINE_SHAPE if has_tiles else line_shape(per_word)
    for each, part in zip(weights, parts, strict=True):
        _pack(each, per_word, shape, part[: _packed_bytes(each)])
    return memory, [part.data_ptr() for part in parts]


def _packed_bytes(blocks: Blocks) -> int:
    per_row = blocks.whole[0].nbytes + _kept(blocks.scales)[0].nbytes
    return -(-len(blocks.whole) // PANEL) * PANEL * per_row


def _pack(blocks: Blocks, per_word: int, line: tuple[int, int], target: Tensor) -> None:
    whole, scales, is_int4 = whole_numbers(blocks.whole), _kept(blocks.scales), blocks.whole.dtype == torch.uint8
    groups, num_scale_bytes = scales.shape[1], PANEL * scales.element_size()
    panels = target.view(-(-len(whole) // PANEL), groups, -1)
    for first, rows in zip(range(0, len(whole), PANEL), panels, strict=True):
        missing = (0, 0, 0, max(0, first + PANEL - len(whole)))
        numbers, factors = (functional.pad(each[first : first + PANEL], missing) for each in (whole, scales))
        words = numbers.view(PANEL, -1, per_word).transpose(0, 1).reshape(groups, -1)
        if is_int4:
            vectors = (words + ZERO).to(torch.uint8).view(groups, -1, *line).transpose(2, 3)
            words = vectors[..., ::2] | vectors[..., 1::2] << 4
        rows[:, :num_scale_bytes] = factors.t().contiguous().view(torch.uint8)
        rows[:, num_scale_bytes:] = words.reshape(groups, -1).view(torch.uint8)


@compiled_fastmath
def multiply_quantized(
    like: Any,
    has_tiles: bool,
    layout: int,
    rows: int,
    weight: int,
    bias: int,
    output: Any,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    panel: int,
    scratch: int,
) -> None:
    """`linear.numba.multiply` with a weight that is packed, of a `layout_of`."""
    bits, is_half, is_grouped = layout % 16, layout // 16 % 2, layout // 32
    scale_bytes, block_bytes = PANEL * (2 if is_half else 4), PANEL * GROUP * bits // 8
    stride = block_bytes + (scale_bytes if is_grouped else 0)
    start = weight + panel * (num_features // GROUP * stride + (0 if is_grouped else scale_bytes))
    source = QuantizedPanel(start, stride if is_grouped else 0, start + scale_bytes, stride, is_half)
    words, sums = scratch + 8 * PANEL, scratch + 8 * PANEL + 4 * PANEL * CHUNK
    if has_tiles:
        multiply_dequantized(bits, source, rows, num_rows, num_features, words, sums)
    else:
        _multiply_vectors(like, bits, source, rows, num_rows, num_features, words, sums)
    write_sums(like, sums, bias, output, num_rows, num_outputs, PANEL * panel)


@compiled_fastmath
def _multiply_vectors(
    like: Any, bits: int, panel: Any, rows: int, num_rows: int, num_features: int, words: int, sums: int
) -> None:
    """Write the products of rows with a panel to sums [rows, `PANEL`], by vector instructions."""
    itemsize = array_at(rows, (1,), like).itemsize
    per_word, first, num_groups = 4 // itemsize if PAIRS else 1, rows, num_features // GROUP
    if not PAIRS and itemsize < 4:
        first = sums + 4 * PANEL * num_rows
        for k in range(0, num_rows * num_features, LANES):
            write_vector(vector_at(rows + itemsize * k, like), first + 4 * k, FLOAT)
    totals = float32_at(sums, (num_rows, PANEL))
    totals[:] = 0
    is_few, group_bytes = num_rows <= FEW_ROWS, 4 * GROUP // per_word
    chunk = num_groups if is_few else CHUNK * per_word // GROUP
    for group in range(0, num_groups, chunk):
        count = min(chunk, num_groups - group)
        part = first + group_bytes * group, group_bytes * num_groups
        scales, numbers = panel.scales + panel.scale_stride * group, panel.numbers + panel.stride * group
        source = QuantizedPanel(scales, panel.scale_stride, numbers, panel.stride, panel.is_half)
        if is_few:
            _multiply_few(like, bits, part, num_rows, source, count, sums)
        else:
            stride = PANEL * group_bytes
            for block in range(count):
                _widen(like, bits, numbers + panel.stride * block, words + stride * block)
            wide = QuantizedPanel(scales, panel.scale_stride, words, stride, panel.is_half)
            _multiply_wide(like, part, num_rows, wide, count, sums)
    if panel.scale_stride == 0:
        for row in range(num_rows):
            for lane in range(0, PANEL, LANES):
                target = sums + 4 * (PANEL * row + lane)
                scaled = vector_at(target, FLOAT) * vector_at(panel.scales + 4 * lane, FLOAT)
                write_vector(scaled, target, FLOAT)


_one_of_bytes, _two_of_bytes, _four_of_bytes, _eight_of_bytes, _all_of_bytes = (
    quantized_tile(rows, 8) for rows in (1, 2, 4, 8, _TILE_ROWS)
)
_one_of_nibbles, _two_of_nibbles, _four_of_nibbles, _eight_of_nibbles, _all_of_nibbles = (
    quantized_tile(rows, 4) for rows in (1, 2, 4, 8, _TILE_ROWS)
)
_widen_bytes, _widen_nibbles = widening(8), widening(4)
_four, _eight, _all = (quantized_tile(rows, 0) for rows in (4, 8, _TILE_ROWS))


@compiled_fastmath
def _multiply_few(like: Any, bits: int, rows: Any, num_rows: int, panel: Any, num_blocks: int, sums: int) -> None:
    """Widen a panel while at most `FEW_ROWS` rows are multiplied with it, an address and the bytes of a row."""
    size = 8 if num_rows > _TILE_ROWS else _TILE_ROWS
    for row in range(0, num_rows, size):
        x, y, last = rows[0] + row * rows[1], sums + 4 * PANEL * row, min(num_rows - row, size) - 1
        if bits == 8:
            _multiply_bytes(like, x, rows[1], last, panel, num_blocks, y)
        else:
            _multiply_nibbles(like, x, rows[1], last, panel, num_blocks, y)


@compiled_fastmath
def _multiply_bytes(like: Any, x: int, size: int, last: int, panel: Any, num_blocks: int, sums: int) -> None:
    if last >= 8:
        _all_of_bytes(like, x, size, last, panel, num_blocks, sums)
    elif last >= 4:
        _eight_of_bytes(like, x, size, last, panel, num_blocks, sums)
    elif last >= 2:
        _four_of_bytes(like, x, size, last, panel, num_blocks, sums)
    elif last:
        _two_of_bytes(like, x, size, last, panel, num_blocks, sums)
    else:
        _one_of_bytes(like, x, size, last, panel, num_blocks, sums)


@compiled_fastmath
def _multiply_nibbles(like: Any, x: int, size: int, last: int, panel: Any, num_blocks: int, sums: int) -> None:
    if last >= 8:
        _all_of_nibbles(like, x, size, last, panel, num_blocks, sums)
    elif last >= 4:
        _eight_of_nibbles(like, x, size, last, panel, num_blocks, sums)
    elif last >= 2:
        _four_of_nibbles(like, x, size, last, panel, num_blocks, sums)
    elif last:
        _two_of_nibbles(like, x, size, last, panel, num_blocks, sums)
    else:
        _one_of_nibbles(like, x, size, last, panel, num_blocks, sums)


@compiled_fastmath
def _widen(like: Any, bits: int, numbers: int, words: int) -> None:
    """Write a block of a panel as `words`."""
    if bits == 8:
        _widen_bytes(like, numbers, words)
    else:
        _widen_nibbles(like, numbers, words)


@compiled_fastmath
def _multiply_wide(like: Any, rows: Any, num_rows: int, panel: Any, num_blocks: int, sums: int) -> None:
    """Multiply rows, an address and the bytes of a row, with a panel that is widened."""
    for row in range(0, num_rows, _TILE_ROWS):
        x, y, last = rows[0] + row * rows[1], sums + 4 * PANEL * row, min(num_rows - row, _TILE_ROWS) - 1
        if last >= 8:
            _all(like, x, rows[1], last, panel, num_blocks, y)
        elif last >= 4:
            _eight(like, x, rows[1], last, panel, num_blocks, y)
        else:
            _four(like, x, rows[1], last, panel, num_blocks, y)
