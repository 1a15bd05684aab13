"""Quantized weights for the compiled step of a decoder: panels of whole numbers, dequantized while they are read.

A panel becomes the one that `linear` packs of the dequantized weight in the type of the rows, exact in fp32 and rounded
in bfloat16. So products have the bits of that weight's, and an output depends on its own row alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.linear.gemm_microkernel import BFLOAT, PAIRS, PANEL, prefetch_line
from kitforge.core.kernels.linear.matrix_microkernel import TILE_ROWS, configure_tiles, generate_tiles, multiply_tiles
from kitforge.core.kernels.linear.numba import LINE, add_products, empty_lines, write_sums
from kitforge.core.kernels.numba_runtime import (
    array_at,
    compiled_fastmath,
    float32_at,
    intrinsic,
    narrowed,
)
from kitforge.core.kernels.quantized_linear.reference import GROUP, Blocks, whole_numbers
from kitforge.core.kernels.vectors import LANES, called, pointer_to

_SIGNED: Any = np.int8(0)
_SHORT: Any = np.uint16(0)
_WORD: Any = np.uint32(0)
_ZERO = 8
# Numbers of a vector, and of a line of int4: a word holds a number of each of eight vectors.
_VECTOR, _LINE = 16, 128
# Words of a panel that are dequantized at once: few enough for the L1 cache.
CHUNK = 256
# Words of a panel that are kept while few rows are multiplied with them, a power of two.
_RING = 64
# How far ahead weights are prefetched, in bytes.
_AHEAD = 4096


def layout_of(blocks: Blocks) -> int:
    """Bits of a number, plus 16 where its scale is a float16, plus 32 where a group of features has one."""
    bits, is_half = 4 if blocks.whole.dtype == torch.uint8 else 8, blocks.scales.dtype is torch.float16
    return bits + 16 * is_half + 32 * (blocks.scales.shape[1] > 1)


def pack_blocks(weights: list[Blocks], per_word: int) -> tuple[Tensor, list[int]]:
    """Memory with weights [out, in] packed for rows of `per_word` numbers in a word, and the address of each.

    Of a panel and a group of features, first the scales [`PANEL`], then the words of a panel of `linear` in order. In
    int4 line by line of 128 numbers: word n of 16 has numbers n, 16 + n, ..., the first in the lowest bits."""
    sizes = [-(-_packed_bytes(each) // LINE) * LINE for each in weights]
    memory = empty_lines(sum(sizes))
    parts = torch.split(memory, sizes)
    for each, part in zip(weights, parts, strict=True):
        _pack(each, per_word, part[: _packed_bytes(each)])
    return memory, [part.data_ptr() for part in parts]


def _packed_bytes(blocks: Blocks) -> int:
    per_row = blocks.whole[0].nbytes + blocks.scales[0].nbytes
    return -(-len(blocks.whole) // PANEL) * PANEL * per_row


def _pack(blocks: Blocks, per_word: int, target: Tensor) -> None:
    whole, scales, is_int4 = whole_numbers(blocks.whole), blocks.scales, blocks.whole.dtype == torch.uint8
    groups, num_scale_bytes = scales.shape[1], PANEL * scales.element_size()
    panels = target.view(-(-len(whole) // PANEL), groups, -1)
    for first, rows in zip(range(0, len(whole), PANEL), panels, strict=True):
        missing = (0, 0, 0, max(0, first + PANEL - len(whole)))
        numbers, factors = (functional.pad(each[first : first + PANEL], missing) for each in (whole, scales))
        words = numbers.view(PANEL, -1, per_word).transpose(0, 1).reshape(groups, -1)
        if is_int4:
            vectors = (words + _ZERO).to(torch.uint8).view(groups, -1, _LINE // _VECTOR, _VECTOR).transpose(2, 3)
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
    """`linear.numba.multiply` with a weight that is `packed`, of a `layout_of`."""
    bits, is_half, is_grouped = layout % 16, layout // 16 % 2, layout // 32
    per_word = 4 // array_at(rows, (1,), like).itemsize
    num_words, words = num_features // per_word, scratch + 8 * PANEL
    scale_bytes, block_bytes = PANEL * (2 if is_half else 4), PANEL * GROUP * bits // 8
    stride = block_bytes + (scale_bytes if is_grouped else 0)
    start = weight + panel * (num_features // GROUP * stride + (0 if is_grouped else scale_bytes))
    sums = words + 4 * PANEL * CHUNK
    # Few rows are multiplied with every block of a panel as soon as it is filled.
    is_few = has_tiles and num_rows <= 2 * TILE_ROWS
    chunk, mask = (num_words, _RING - 1) if is_few else (CHUNK, -1)
    for first in range(0, num_words, chunk):
        count, offset = min(chunk, num_words - first), first * per_word // GROUP * stride
        scales = start + (offset if is_grouped else 0)
        source = _Source(bits, is_half, scales, stride if is_grouped else 0, start + scale_bytes + offset, stride)
        if has_tiles:
            part = rows + 4 * first, num_features * 2
            _multiply_filled(source, part, num_rows, words, count, sums, first, mask)
            if num_rows > 2 * TILE_ROWS:
                rest = rows + 4 * first + 2 * TILE_ROWS * 2 * num_features
                more = num_rows - 2 * TILE_ROWS, sums + 4 * PANEL * 2 * TILE_ROWS
                multiply_tiles(rest, 2 * num_features, more[0], words, count, more[1], first, words)
        else:
            _fill(like, source, words, count)
            add_products(like, False, rows, num_rows, num_features, first, count, words, sums, first, words)
    write_sums(like, sums, bias, output, num_rows, num_outputs, PANEL * panel)


class _Source(NamedTuple):
    """Where the numbers of a chunk are."""

    bits: int
    is_half: int  # whether a scale is a float16
    scales: int  # address of the first group's
    scale_stride: int  # bytes to those of the following `GROUP` features; 0: the same
    numbers: int  # address of the first
    stride: int  # bytes to those of the following `GROUP` features


@compiled_fastmath
def _multiply_filled(
    source: Any, rows: Any, num_rows: int, words: int, count: int, sums: int, adds: int, mask: int
) -> None:
    """Fill a panel, and multiply at most two tiles of rows with it, an address and its bytes of a row."""
    few = min(num_rows, 2 * TILE_ROWS)
    first, row_bytes = rows
    configure_tiles(few - TILE_ROWS if few > TILE_ROWS else few)
    origin = source.scales, source.scale_stride, source.numbers, source.stride, source.is_half
    if source.bits == 8:
        if few > TILE_ROWS:
            _two_of_bytes(first, row_bytes, words, count, sums, adds, mask, origin)
        else:
            _one_of_bytes(first, row_bytes, words, count, sums, adds, mask, origin)
    elif few > TILE_ROWS:
        _two_of_nibbles(first, row_bytes, words, count, sums, adds, mask, origin)
    else:
        _one_of_nibbles(first, row_bytes, words, count, sums, adds, mask, origin)


@compiled_fastmath
def _fill(like: Any, source: Any, words: int, num_words: int) -> None:
    """Write the words of a panel in the type of `like`."""
    per_word = 4 // array_at(words, (1,), like).itemsize
    if PAIRS and per_word == 2:
        origin = source.scales, source.scale_stride, source.numbers, source.stride, source.is_half
        if source.bits == 8:
            _bytes(words, num_words, origin)
        else:
            _nibbles(words, num_words, origin)
        return
    width, factors = PANEL * per_word // _VECTOR, words - 8 * PANEL
    vectors, factor = array_at(words, (num_words * width, _VECTOR), like), float32_at(factors, (width, _VECTOR))
    for block in range(num_words * per_word // GROUP):
        _expand(source, block, per_word, factors)
        numbers, start = source.numbers + block * source.stride, block * GROUP * PANEL // _VECTOR
        if source.bits == 8:
            whole = array_at(numbers, (GROUP * PANEL // _VECTOR, _VECTOR), _SIGNED)
            for vector in range(len(whole)):
                for k in range(_VECTOR):
                    number = np.float32(whole[vector, k]) * factor[vector % width, k]
                    vectors[start + vector, k] = narrowed(number, like)
        else:
            lines = array_at(numbers, (GROUP * PANEL // _LINE, _VECTOR), _WORD)
            for vector in range(8 * len(lines)):
                shift = np.uint32(4 * (vector % 8))
                for k in range(_VECTOR):
                    nibble = np.int32(lines[vector // 8, k] >> shift & np.uint32(15)) - np.int32(_ZERO)
                    number = np.float32(nibble) * factor[vector % width, k]
                    vectors[start + vector, k] = narrowed(number, like)


@compiled_fastmath
def _expand(source: Any, block: int, per_word: int, factors: int) -> None:
    """Write the scales of a block in fp32, each for every number of a word."""
    address = source.scales + block * source.scale_stride
    single, half = float32_at(address, (PANEL,)), array_at(address, (PANEL,), _SHORT)
    result = float32_at(factors, (PANEL, per_word))
    for lane in range(PANEL):
        scale = _single(half[lane]) if source.is_half else single[lane]
        for each in range(per_word):
            result[lane, each] = scale


@compiled_fastmath
def _single(half: Any) -> Any:
    """The fp32 value of a finite float16."""
    size = np.int32(half & np.uint16(0x7FFF))
    # Exponents count from 15, those of fp32 from 127; the smallest numbers have none.
    value = _from_bits((size << np.int32(13)) + np.int32(112 << 23)) if size >= 1024 else np.float32(size) * _SMALLEST
    return -value if half & np.uint16(0x8000) else value


_SMALLEST = np.float32(2**-24)


@intrinsic
def _from_bits(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), _VECTOR), ir.VectorType(ir.IntType(32), _VECTOR)
_BYTES, _HALVES = ir.VectorType(ir.IntType(8), _VECTOR), ir.VectorType(BFLOAT, 2 * _VECTOR)


def _loaded_vectors(builder: Any, bits: int, numbers: Any) -> list[Any]:
    """A line's fp32 numbers."""
    if bits == 8:
        whole = [builder.load(pointer_to(builder, numbers, _BYTES, _VECTOR * each), align=16) for each in range(8)]
        return [builder.sitofp(builder.sext(each, _WORDS), _FLOATS) for each in whole]
    words = builder.load(pointer_to(builder, numbers, _WORDS), align=64)
    # A permutation looks at the lowest four bits of an index.
    table = ir.Constant(_FLOATS, [float(each - _ZERO) for each in range(16)])
    shifted = [builder.lshr(words, ir.Constant(_WORDS, [4 * each] * _VECTOR)) for each in range(8)]
    return [called(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, [table, each]) for each in shifted]


def _scale_vectors(builder: Any, scales: Any, is_half: Any) -> list[Any]:
    """The scales of a panel in the order of a word's numbers, each twice."""
    found = []
    for half in range(2):
        single = builder.load(pointer_to(builder, scales, _FLOATS, 64 * half), align=4)
        short = builder.load(pointer_to(builder, scales, ir.VectorType(ir.HalfType(), _VECTOR), 32 * half), align=2)
        both = builder.select(is_half, builder.fpext(short, _FLOATS), single)
        for first in (0, 8):
            order = ir.Constant(_WORDS, [first + lane // 2 for lane in range(_VECTOR)])
            found.append(builder.shuffle_vector(both, both, order))
    return found


def _filler(bits: int, words: Any, mask: Any, origin: list[Any]) -> Any:
    """Code that writes `LANES` words of bfloat16 pairs, a block of `GROUP` features; see `generate_tiles`."""
    scales, scale_stride, numbers, stride, is_half = origin

    def fill(builder: Any, word: Any) -> None:
        if not PAIRS:
            return  # never called, but compiled for a processor that lacks the instructions
        number, block = word.type, builder.udiv(word, word.type(LANES))
        own = builder.add(scales, builder.mul(block, scale_stride))
        factors = _scale_vectors(builder, own, builder.icmp_signed("!=", is_half, number(0)))
        source = builder.add(numbers, builder.mul(block, stride))
        target = builder.add(words, builder.mul(builder.and_(word, mask), number(4 * PANEL)))
        for line in range(GROUP * PANEL // _LINE):
            at = builder.add(source, number(line * _LINE * bits // 8))
            for each in range(0, _LINE * bits // 8, 64):
                prefetch_line(builder, at, _AHEAD + each)
            exact = [builder.fmul(each, factors[k % 4]) for k, each in enumerate(_loaded_vectors(builder, bits, at))]
            # The processor rounds two vectors at once.
            for k in range(0, 8, 2):
                pair = [exact[k + 1], exact[k]]
                both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _HALVES, pair)
                builder.store(both, pointer_to(builder, target, _HALVES, 2 * (line * _LINE + k * _VECTOR)), align=64)

    return fill


def _filling(bits: int) -> Any:
    """An intrinsic, with `PAIRS`: `(words, num_words, origin)` writes a panel of bfloat16."""

    def typed(_context: Any, _words: Any, _num_words: Any, origin: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            words, num_words, packed = arguments
            number = words.type
            fill = _filler(bits, words, number(-1), cast(Any, cgutils).unpack_tuple(builder, packed, len(origin)))
            with cast(Any, cgutils).for_range_slice(builder, number(0), num_words, number(LANES), number) as (word, _):
                fill(builder, word)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, origin), generate

    return intrinsic(typed)


def _multiplying(bits: int, num_tiles: int) -> Any:
    """An intrinsic: the tiles of `matrix_microkernel`, which fills the panel as it goes."""

    def typed(
        _context: Any,
        _rows: Any,
        _row_bytes: Any,
        _words: Any,
        _num_words: Any,
        _sums: Any,
        _adds: Any,
        _mask: Any,
        origin: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            *numbers, packed = arguments
            fields = cast(Any, cgutils).unpack_tuple(builder, packed, len(origin))
            fill = _filler(bits, numbers[2], numbers[6], fields)
            generate_tiles(num_tiles, builder, numbers, fill)
            return context.get_dummy_value()

        return types.void(*(types.intp for _ in range(7)), origin), generate

    return intrinsic(typed)


_bytes, _nibbles = _filling(8), _filling(4)
_one_of_bytes, _two_of_bytes = _multiplying(8, 1), _multiplying(8, 2)
_one_of_nibbles, _two_of_nibbles = _multiplying(4, 1), _multiplying(4, 2)
