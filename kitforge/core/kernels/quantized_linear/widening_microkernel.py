"""GEMM microkernel for quantized weights: a tile of input rows by a panel of whole numbers, widened in registers.

bfloat16 holds the whole numbers of int8 and int4 exactly, as fp32 does. They are multiplied as they are, and a sum over
the features of a scale is multiplied by it in fp32. Every sum runs over the features in order, so an output has the
same bits whatever rows are multiplied beside it.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, PANEL, plus_products, prefetch_line
from kitforge.core.kernels.cpu_engine.numba_runtime import intrinsic, lowering
from kitforge.core.kernels.cpu_engine.vectors import LANES, called, on_all_lanes, pointer_to
from kitforge.core.kernels.quantized_linear.reference import GROUP

# What int4 adds to a number.
ZERO = 8
# Lines of a block, which are `GROUP` features of a panel.
BLOCK_LINES = 8
_UNROLLED = 2
# Words of a panel that are widened at once: few enough for the L1 cache.
CHUNK = 256
# How far ahead weights are prefetched, in bytes.
AHEAD = 4096

_FLOAT, _INT, _SHORT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_VECTOR, _WORDS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, _SHORT))
_PAIRS = ir.VectorType(_SHORT, 2 * LANES)


class QuantizedPanel(NamedTuple):
    """Where the numbers and scales of a panel are."""

    scales: int  # address of those of the first group
    scale_stride: int  # bytes to those of the following `GROUP` features; 0 where a row has one scale
    numbers: int  # address of the first group's
    stride: int  # bytes to those of the following `GROUP` features
    is_half: int  # whether a scale is a float16


def numbers_per_word(itemsize: int) -> int:
    """Of a panel for rows of this element size: two in bfloat16 with `PAIRS`; else rows are multiplied in fp32."""
    return 4 // itemsize if PAIRS else 1


def _line_vectors(per_word: int) -> int:
    """In int4, a word of a line holds a number of each of its vectors."""
    return 8 // per_word


def line_shape(per_word: int) -> tuple[int, int]:
    """Vectors of a line and numbers of a vector."""
    return _line_vectors(per_word), LANES * per_word


def _widened(builder: Any, bits: int, per_word: int, address: Any) -> list[Any]:
    """The vectors of a line: fp32 numbers, or words of bfloat16 pairs."""
    count = _line_vectors(per_word)
    if bits > 8:
        kind, size = _WORDS if per_word == 2 else _VECTOR, 4 * LANES
        return [builder.load(pointer_to(builder, address, kind, size * each), align=size) for each in range(count)]
    if bits == 8:
        kind = ir.VectorType(_BYTE, LANES)
        starts = [pointer_to(builder, address, kind, LANES * each) for each in range(count * per_word)]
        whole = [builder.sext(builder.load(start, align=LANES), _WORDS) for start in starts]
        exact = [builder.sitofp(each, _VECTOR) for each in whole]
        return exact if per_word == 1 else [_paired(builder, *exact[k : k + 2]) for k in range(0, len(exact), 2)]
    kind = _PAIRS if per_word == 2 else _WORDS
    words = builder.load(pointer_to(builder, address, kind), align=4 * LANES)
    shifted = [builder.lshr(words, ir.Constant(kind, [4 * each] * kind.count)) for each in range(count)]
    return [_looked_up(builder, each) for each in shifted]


def _paired(builder: Any, one: Any, other: Any) -> Any:
    """Words of the numbers of two vectors in order, which bfloat16 holds exactly: it is the upper half of fp32."""
    halves = [builder.bitcast(each, _PAIRS) for each in (one, other)]
    upper = ir.Constant(ir.VectorType(_INT, 2 * LANES), list(range(1, 4 * LANES, 2)))
    return builder.bitcast(builder.shuffle_vector(*halves, upper), _WORDS)


def _looked_up(builder: Any, indices: Any) -> Any:
    """The numbers of int4 in the lowest bits of words, as fp32, or of 16-bit numbers, as bfloat16."""
    if indices.type == _PAIRS:
        # A permutation of 32 numbers looks at five bits.
        table = ir.Constant(_PAIRS, [_upper_half(each % 16 - ZERO) for each in range(32)])
        return builder.bitcast(called(builder, "llvm.x86.avx512.permvar.hi.512", _PAIRS, [table, indices]), _WORDS)
    if LANES == 16:
        table = ir.Constant(_VECTOR, [float(each - ZERO) for each in range(16)])
        return called(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [table, indices])
    nibbles = builder.and_(indices, ir.Constant(_WORDS, [15] * LANES))
    return builder.sitofp(builder.sub(nibbles, ir.Constant(_WORDS, [ZERO] * LANES)), _VECTOR)


def _upper_half(number: int) -> int:
    """The bits of a small whole number in bfloat16."""
    exponent = abs(number).bit_length() - 1
    size = 0 if number == 0 else (127 + exponent) << 7 | (abs(number) << 7 >> exponent) & 0x7F
    return size | (number < 0) << 15


def _scales(builder: Any, address: Any, is_half: Any) -> list[Any]:
    """Both vectors of a panel's scales, of float16 or fp32."""
    found = []
    for half in range(2):
        single = builder.load(pointer_to(builder, address, _VECTOR, 4 * LANES * half), align=2)
        short = builder.load(pointer_to(builder, address, _SHORTS, 2 * LANES * half), align=2)
        found.append(builder.select(is_half, _single(builder, short), single))
    return found


def _single(builder: Any, half: Any) -> Any:
    """The fp32 values of finite float16."""
    if LANES == 16:
        return builder.fpext(builder.bitcast(half, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)

    def constant(number: int) -> Any:
        return ir.Constant(_WORDS, [number] * LANES)

    bits = builder.zext(half, _WORDS)
    size, sign = builder.and_(bits, constant(0x7FFF)), builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    # Exponents count from 15, those of fp32 from 127; the smallest numbers have none.
    usual = builder.add(builder.shl(size, constant(13)), constant(112 << 23))
    small = builder.fmul(builder.sitofp(size, _VECTOR), ir.Constant(_VECTOR, [2.0**-24] * LANES))
    is_usual = builder.icmp_unsigned(">=", size, constant(1024))
    value = builder.select(is_usual, usual, builder.bitcast(small, _WORDS))
    return builder.bitcast(builder.or_(value, sign), _VECTOR)


def _line_bytes(bits: int, per_word: int) -> int:
    return LANES * bits if bits <= 8 else 4 * LANES * _line_vectors(per_word)


def _add_lines(builder: Any, form: tuple[int, int], rows: list[Any], lines: Any, sums: list[list[Any]]) -> None:
    """Add the products of `_UNROLLED` lines with rows, by addresses, to the sums of each row in registers."""
    (bits, per_word), number = form, lines.type
    size, kind = _line_bytes(bits, per_word), _INT if per_word == 2 else _FLOAT
    for line in range(_UNROLLED):
        for each in range(0, size if bits <= 8 else 0, 64):
            prefetch_line(builder, lines, AHEAD + line * size + each)
        vectors = _widened(builder, bits, per_word, builder.add(lines, number(line * size)))
        for k in range(0, len(vectors), 2):
            offset = 2 * (line * len(vectors) + k)
            for row, totals in zip(rows, sums, strict=True):
                factor = on_all_lanes(builder, builder.load(pointer_to(builder, row, kind, offset), align=2))
                for total, vector in zip(totals, vectors[k : k + 2], strict=True):
                    builder.store(plus_products(builder, builder.load(total), factor, vector), total)


def _generate(num_rows: int, form: tuple[int, int], builder: Any, arguments: Any) -> None:
    """See `quantized_tile`; `form` is the bits of a number, above 8 if the panel is widened, and numbers of a word."""
    input, row_bytes, last, panel, num_blocks, output = arguments
    scales, scale_stride, numbers, stride, is_half = panel
    number = input.type
    zero, size = ir.Constant(_VECTOR, [0.0] * LANES), number(_line_bytes(*form))
    # With fewer rows than the tile has, the last is multiplied again.
    indices = [builder.select(builder.icmp_signed("<", number(k), last), number(k), last) for k in range(num_rows)]
    rows = [builder.add(input, builder.mul(index, row_bytes)) for index in indices]
    results = [builder.add(output, builder.mul(index, number(4 * PANEL))) for index in indices]
    targets = [[pointer_to(builder, each, _VECTOR, 4 * LANES * half) for half in range(2)] for each in results]
    grouped, half = (builder.icmp_signed("!=", each, number(0)) for each in (scale_stride, is_half))
    sums = [[lowering.alloca_once(builder, _VECTOR) for _ in pair] for pair in targets]
    for target, total in _each(targets, sums):
        builder.store(builder.select(grouped, zero, builder.load(target, align=4)), total)
    with lowering.for_range_slice(builder, number(0), num_blocks, number(1), number) as (block, _):
        offset = builder.mul(block, number(4 * GROUP // form[1]))
        start, own = (
            builder.add(each, builder.mul(block, by)) for each, by in ((numbers, stride), (scales, scale_stride))
        )
        with lowering.for_range_slice(builder, number(0), number(BLOCK_LINES), number(_UNROLLED), number) as (line, _):
            inner = builder.add(offset, builder.mul(line, number(4 * 4 // form[1])))
            lines = builder.add(start, builder.mul(line, size))
            _add_lines(builder, form, [builder.add(row, inner) for row in rows], lines, sums)
        with builder.if_then(grouped):
            prefetch_line(builder, own, AHEAD)
            _add_scaled(builder, _scales(builder, own, half), targets, sums)
            for _, total in _each(targets, sums):
                builder.store(zero, total)
    with builder.if_then(builder.not_(grouped)):
        for target, total in _each(targets, sums):
            builder.store(builder.load(total), target).align = 4


def _add_scaled(builder: Any, scales: list[Any], targets: list[list[Any]], sums: list[list[Any]]) -> None:
    """Add the sums of a block, times the scales, to the output."""
    # The last row may be multiplied several times: all numbers are read before one is written.
    scaled = [
        called(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [builder.load(total), scale, builder.load(target, align=4)])
        for pair, totals in zip(targets, sums, strict=True)
        for target, total, scale in zip(pair, totals, scales, strict=True)
    ]
    for (target, _), product in zip(_each(targets, sums), scaled, strict=True):
        builder.store(product, target).align = 4


def _each(one: list[list[Any]], other: list[list[Any]]) -> list[tuple[Any, Any]]:
    """Pairs of both, of all rows."""
    return [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]


def _form(like: Any, bits: int) -> tuple[int, int]:
    per_word = numbers_per_word(4 if like == types.float32 else 2)
    return bits or 32 // per_word, per_word


def quantized_tile(num_rows: int, bits: int) -> Any:
    """An intrinsic: add the products of at most `num_rows` rows with a panel, of int4 or int8, or at 0 bits of a panel
    that is `widened`.

    Arguments are the element type of the rows, fp32 or with `PAIRS` bfloat16 (as uint16); the address of the first row,
    their stride in bytes and the index of the last row; a `QuantizedPanel` and its number of blocks; and the address of
    the fp32 output [rows, `PANEL`]. Where a row has one scale, the output is not yet multiplied by it.
    """

    def typed(
        _context: Any, like: Any, input: Any, row_bytes: Any, last: Any, panel: Any, num_blocks: Any, output: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _, first, stride, count, packed, *sizes = arguments
            fields = lowering.unpack_tuple(builder, packed, len(panel))
            _generate(num_rows, _form(like, bits), builder, [first, stride, count, fields, *sizes])
            return context.get_dummy_value()

        integers = (input, row_bytes, last, panel, num_blocks, output)
        return types.void(like, *(each if each is panel else types.intp for each in integers)), generate

    return intrinsic(typed)


def widening(bits: int) -> Any:
    """An intrinsic: `(like, numbers, words)` writes a block of int4 or int8 to `words`, widened for rows of `like`."""

    def typed(_context: Any, like: Any, _numbers: Any, _words: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _, numbers, words = arguments
            form, wide = _form(like, bits), _line_bytes(*_form(like, 0))
            for line in range(BLOCK_LINES):
                size = _line_bytes(*form)
                source, target = (
                    builder.add(each, each.type(line * step)) for each, step in ((numbers, size), (words, wide))
                )
                for each in range(0, size, 64):
                    prefetch_line(builder, source, AHEAD + each)
                for k, vector in enumerate(_widened(builder, *form, source)):
                    builder.store(vector, pointer_to(builder, target, vector.type, 4 * LANES * k), align=4 * LANES)
            return context.get_dummy_value()

        return types.void(like, types.intp, types.intp), generate

    return intrinsic(typed)
