"""Quantized weights for the matrix unit of a processor: panels of whole numbers, dequantized while they are read.

A panel becomes the one that `linear` packs of the dequantized weight, rounded in bfloat16. So products have the bits of
that weight's.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.gemm_microkernel import BFLOAT, PAIRS, PANEL, prefetch_line
from kitforge.core.kernels.cpu_engine.matrix_microkernel import (
    TILE_ROWS,
    configure_tiles,
    generate_tiles,
    multiply_tiles,
)
from kitforge.core.kernels.cpu_engine.numba_runtime import compiled_fastmath, intrinsic, lowering
from kitforge.core.kernels.cpu_engine.vectors import LANES, called, pointer_to
from kitforge.core.kernels.quantized_linear.reference import GROUP
from kitforge.core.kernels.quantized_linear.widening_microkernel import AHEAD, CHUNK, ZERO, QuantizedPanel

# Vectors of a line of int4, and numbers of a vector: a word holds a number of each of eight vectors.
LINE_SHAPE = _, _VECTOR = 8, 16
_LINE = 8 * _VECTOR
# Words of a panel that are kept while few rows are multiplied with them, a power of two.
_RING = 64


@compiled_fastmath
def multiply_dequantized(
    bits: int, panel: Any, rows: int, num_rows: int, num_features: int, words: int, sums: int
) -> None:
    """Write the products of rows with a panel to sums [rows, `PANEL`]."""
    num_words, row_bytes = num_features // 2, 2 * num_features
    # Few rows are multiplied with every block of a panel as soon as it is filled.
    chunk, mask = (num_words, _RING - 1) if num_rows <= 2 * TILE_ROWS else (CHUNK, -1)
    for first in range(0, num_words, chunk):
        count, group = min(chunk, num_words - first), first * 2 // GROUP
        scales, numbers = panel.scales + group * panel.scale_stride, panel.numbers + group * panel.stride
        source = QuantizedPanel(scales, panel.scale_stride, numbers, panel.stride, panel.is_half)
        _multiply_filled(bits, source, (rows + 4 * first, row_bytes), num_rows, words, count, sums, first, mask)
        if num_rows > 2 * TILE_ROWS:
            rest, more = rows + 4 * first + 2 * TILE_ROWS * row_bytes, num_rows - 2 * TILE_ROWS
            target = sums + 4 * PANEL * 2 * TILE_ROWS
            multiply_tiles(rest, row_bytes, more, words, count, target, first, words)


@compiled_fastmath
def _multiply_filled(
    bits: int, panel: Any, rows: Any, num_rows: int, words: int, count: int, sums: int, adds: int, mask: int
) -> None:
    """Fill a panel, and multiply at most two tiles of rows with it, an address and its bytes of a row."""
    few = min(num_rows, 2 * TILE_ROWS)
    first, row_bytes = rows
    configure_tiles(few - TILE_ROWS if few > TILE_ROWS else few)
    if bits == 8:
        if few > TILE_ROWS:
            _two_of_bytes(first, row_bytes, words, count, sums, adds, mask, panel)
        else:
            _one_of_bytes(first, row_bytes, words, count, sums, adds, mask, panel)
    elif few > TILE_ROWS:
        _two_of_nibbles(first, row_bytes, words, count, sums, adds, mask, panel)
    else:
        _one_of_nibbles(first, row_bytes, words, count, sums, adds, mask, panel)


_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), _VECTOR), ir.VectorType(ir.IntType(32), _VECTOR)
_BYTES, _HALVES = ir.VectorType(ir.IntType(8), _VECTOR), ir.VectorType(BFLOAT, 2 * _VECTOR)


def _loaded_vectors(builder: Any, bits: int, numbers: Any) -> list[Any]:
    """A line's fp32 numbers."""
    if bits == 8:
        whole = [builder.load(pointer_to(builder, numbers, _BYTES, _VECTOR * each), align=16) for each in range(8)]
        return [builder.sitofp(builder.sext(each, _WORDS), _FLOATS) for each in whole]
    words = builder.load(pointer_to(builder, numbers, _WORDS), align=64)
    # A permutation looks at the lowest four bits of an index.
    table = ir.Constant(_FLOATS, [float(each - ZERO) for each in range(16)])
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
                prefetch_line(builder, at, AHEAD + each)
            exact = [builder.fmul(each, factors[k % 4]) for k, each in enumerate(_loaded_vectors(builder, bits, at))]
            # The processor rounds two vectors at once.
            for k in range(0, 8, 2):
                pair = [exact[k + 1], exact[k]]
                both = called(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _HALVES, pair)
                builder.store(both, pointer_to(builder, target, _HALVES, 2 * (line * _LINE + k * _VECTOR)), align=64)

    return fill


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
            fields = lowering.unpack_tuple(builder, packed, len(origin))
            fill = _filler(bits, numbers[2], numbers[6], fields)
            generate_tiles(num_tiles, builder, numbers, fill)
            return context.get_dummy_value()

        return types.void(*(types.intp for _ in range(7)), origin), generate

    return intrinsic(typed)


_one_of_bytes, _two_of_bytes = _multiplying(8, 1), _multiplying(8, 2)
_one_of_nibbles, _two_of_nibbles = _multiplying(4, 1), _multiplying(4, 2)
