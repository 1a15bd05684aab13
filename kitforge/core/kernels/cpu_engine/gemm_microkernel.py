"""GEMM microkernel of `linear`: a tile of input rows by a panel of weight rows in vector registers.

A panel holds `PANEL` rows of a weight transposed, so that a vector holds one word of several rows: an fp32 number, or
two bfloat16 numbers of adjacent features. Every sum runs over the features in order, so an output has the same bits
whatever rows are multiplied beside it. Written in LLVM instructions, since LLVM's own vectorizer does not keep all sums
in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.numba_runtime import FEATURES, intrinsic, lowering
from kitforge.core.kernels.cpu_engine.vectors import LANES, called, on_all_lanes, pointer_to

# Whether the processor has dot products of bfloat16 pairs.
PAIRS = "+avx512bf16" in FEATURES
# A panel is two vectors wide.
PANEL = 2 * LANES
# Rows of a tile: as many sums as there are registers.
ROWS = 12 if LANES == 16 else 6
_WORD_BYTES, _UNROLLED = 4, 4
# Words of a row that are interleaved with those of others.
_QUARTER = 4

_FLOAT, _INT, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()


def _loaded(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    loaded = builder.load(pointer_to(builder, address, kind, offset))
    loaded.align = 2
    return loaded


def prefetch_line(builder: Any, address: Any, offset: int) -> None:
    """Prefetch a cache line to the L2 cache."""
    pointer = pointer_to(builder, address, ir.IntType(8), offset)
    called(builder, "llvm.prefetch.p0i8", ir.VoidType(), [pointer, _INT(0), _INT(2), _INT(1)])


def _joined(builder: Any, addresses: list[Any], offset: int) -> Any:
    """A vector of four words at each of the addresses."""
    parts = [_loaded(builder, address, ir.VectorType(_INT, _QUARTER), offset) for address in addresses]
    while len(parts) > 1:
        order = ir.VectorType(_INT, 2 * parts[0].type.count)
        parts = [
            builder.shuffle_vector(one, other, ir.Constant(order, list(range(order.count))))
            for one, other in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _interleaved(builder: Any, one: Any, other: Any, size: int) -> tuple[Any, Any]:
    """In each quarter, `size` words of the one and of the other in turn, from the first and the second half of it."""
    halves = []
    for half in range(2):
        picks: list[int] = []
        for first in range(2 * half, LANES, _QUARTER):
            own, others = [first, first + 1], [first + LANES, first + 1 + LANES]
            picks += [own[0], others[0], own[1], others[1]] if size == 1 else own + others
        halves.append(builder.shuffle_vector(one, other, ir.Constant(_WORDS, picks)))
    return halves[0], halves[1]


@intrinsic
def transpose(_context: Any, _addresses: Any, _offset: Any, _target: Any, _ahead: Any) -> Any:
    """`transpose(addresses, offset, target, ahead)` writes a square of words to a panel at `target`: a column for each
    of `LANES` addresses of rows (int64, at `addresses`), of the words from `offset` bytes on. As much memory from
    `ahead` on is prefetched."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        addresses, offset, target, ahead = arguments
        rows = []
        for lane in range(LANES):
            rows.append(builder.add(builder.load(pointer_to(builder, addresses, addresses.type, 8 * lane)), offset))
            prefetch_line(builder, ahead, _WORD_BYTES * LANES * lane)
        for first in range(0, LANES, _QUARTER):
            # Four vectors, of every fourth row each: a quarter of a vector holds four words of a row.
            parts = [_joined(builder, rows[row::_QUARTER], _WORD_BYTES * first) for row in range(_QUARTER)]
            pairs = [_interleaved(builder, parts[half], parts[half + 1], 1) for half in (0, 2)]
            words = [each for one, other in zip(*pairs, strict=True) for each in _interleaved(builder, one, other, 2)]
            for word, column in enumerate(words, first):
                builder.store(column, pointer_to(builder, target, _WORDS, word * PANEL * _WORD_BYTES)).align = 4
        return context.get_dummy_value()

    return types.void(*(types.intp for _ in range(4))), generate


def widened_words(builder: Any, words: Any) -> list[Any]:
    """The fp32 numbers of both bfloat16 numbers of words."""
    lower = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    upper = builder.and_(words, ir.Constant(_WORDS, [-(2**16)] * LANES))
    return [builder.bitcast(each, _VECTOR) for each in (lower, upper)]


def plus_products(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """`total + one * other`; of pairs, both products."""
    if one.type == _VECTOR:
        return called(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [one, other, total])
    halves = ir.VectorType(BFLOAT, 2 * LANES)
    pairs = [builder.bitcast(each, halves) for each in (one, other)]
    return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, [total, *pairs])


def _factors(builder: Any, address: Any, input_size: int, weight_size: int, word: int) -> list[Any]:
    """A word of an input row for all lanes; two numbers for a word of two bfloat16 numbers that are multiplied in
    fp32."""
    if input_size == weight_size:
        kind = _FLOAT if input_size == 4 else _INT
        return [on_all_lanes(builder, _loaded(builder, address, kind, word * _WORD_BYTES))]
    return [on_all_lanes(builder, _loaded(builder, address, _FLOAT, 8 * word + 4 * half)) for half in range(2)]


def _weights(builder: Any, address: Any, input_size: int, weight_size: int) -> list[Any]:
    """A vector of a panel, once for each of `_factors`."""
    words = _loaded(builder, address, _VECTOR if weight_size == 4 else _WORDS)
    return [words] if input_size == weight_size else widened_words(builder, words)


def _generate(rows: int, input_size: int, weight_size: int, builder: Any, arguments: Any) -> None:
    """See `tile`; sizes are bytes of an element."""
    input, row_bytes, last, panel, num_words, output, adds, ahead = arguments
    number = input.type
    row_words = _WORD_BYTES if input_size == weight_size else 2 * _WORD_BYTES
    # With fewer rows than the tile has, the last is multiplied again.
    indices = [builder.select(builder.icmp_signed("<", number(row), last), number(row), last) for row in range(rows)]
    starts = [builder.add(input, builder.mul(index, row_bytes)) for index in indices]
    targets = [
        [
            pointer_to(builder, builder.add(output, builder.mul(index, number(4 * PANEL))), _VECTOR, 4 * LANES * half)
            for half in range(2)
        ]
        for index in indices
    ]
    zero, continues = ir.Constant(_VECTOR, [0.0] * LANES), builder.icmp_signed("!=", adds, number(0))
    sums: list[list[Any]] = []
    for pair in targets:
        sums.append([])
        for target in pair:
            before = builder.load(target)
            before.align = 4
            sums[-1].append(lowering.alloca_once_value(builder, builder.select(continues, before, zero)))
    with lowering.for_range_slice(builder, number(0), num_words, number(_UNROLLED), number) as (word, _):
        inputs = [builder.add(start, builder.mul(word, number(row_words))) for start in starts]
        offset = builder.mul(word, number(PANEL * _WORD_BYTES))
        weights = builder.add(panel, offset)
        for line in range(0, _UNROLLED * PANEL * _WORD_BYTES, 64):
            prefetch_line(builder, builder.add(ahead, offset), line)
        for step in range(_UNROLLED):
            vectors = [
                _weights(
                    builder,
                    builder.add(weights, number(_WORD_BYTES * (step * PANEL + half * LANES))),
                    input_size,
                    weight_size,
                )
                for half in range(2)
            ]
            for address, totals in zip(inputs, sums, strict=True):
                factors = _factors(builder, address, input_size, weight_size, step)
                for total, vector in zip(totals, vectors, strict=True):
                    for factor, weight in zip(factors, vector, strict=True):
                        builder.store(plus_products(builder, builder.load(total), factor, weight), total)
    for pair, totals in zip(targets, sums, strict=True):
        for target, total in zip(pair, totals, strict=True):
            builder.store(builder.load(total), target).align = 4


def tile(rows: int) -> Any:
    """An intrinsic: the products of at most `rows` rows of an input with a panel, over the first `num_words` words, a
    multiple of `LANES`.

    Arguments are addresses: the first row of the input, its stride in bytes and the index of the last row; the panel;
    the fp32 output [rows, `PANEL`], and whether to add to it (1) or to write it (0); memory to
    prefetch, of the size of the panel. `one` has the element type of the
    input and `other` that of the weight: both fp32, both bfloat16 (as uint16) with `PAIRS`, else fp32 and bfloat16.
    """

    def typed(
        _context: Any,
        one: Any,
        other: Any,
        input: Any,
        row_bytes: Any,
        last: Any,
        panel: Any,
        num_words: Any,
        output: Any,
        adds: Any,
        ahead: Any,
    ) -> Any:
        one_size, other_size = (4 if number == types.float32 else 2 for number in (one, other))

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _generate(rows, one_size, other_size, builder, arguments[2:])
            return context.get_dummy_value()

        numbers = (input, row_bytes, last, panel, num_words, output, adds, ahead)
        return types.void(one, other, *(types.intp for _ in numbers)), generate

    return intrinsic(typed)
