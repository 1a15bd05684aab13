"""A few rows of an input by a few of a weight, in the processor's vectors: the inside of `linear` for few rows.

Written as instructions, since a compiler that finds the vectors itself does not keep all the sums in registers.
"""

from __future__ import annotations

from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

_FEATURES = str(cast(Any, config).CPU_FEATURES or cast(Any, get_host_cpu_features)()).split(",")
_WIDE = "+avx512f" in _FEATURES
# Whether pairs of bfloat16 are multiplied and added in one instruction.
PAIRS = "+avx512bf16" in _FEATURES
_LANES = 16 if _WIDE else 8
# How many rows of the input, at most, meet how many of the weight: as many sums as there are registers for.
ROWS, COLUMNS = 8 if _WIDE else 4, 3
# Features that a tile takes at once; what is left over is the caller's.
FEATURES = 2 * _LANES
# How many bytes ahead memory is asked for. Rows of a weight follow one another, so that the next is asked for as well.
_AHEAD = 1024

_FLOAT, _INT, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR = ir.VectorType(_FLOAT, _LANES)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's own bfloat16, of which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


def _called(builder: Any, name: str, result: Any, arguments: list[Any], **options: Any) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    lowering = cast(Any, cgutils)
    return builder.call(lowering.get_or_insert_function(builder.module, kind, name), arguments, **options)


def _loaded(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 2
    return loaded


def _widened(builder: Any, half: Any) -> Any:
    """[lanes] in fp32 of bfloat16."""
    wide = ir.VectorType(_INT, _LANES)
    return builder.bitcast(builder.shl(builder.zext(half, wide), ir.Constant(wide, [16] * _LANES)), _VECTOR)


def _vectors(builder: Any, address: Any, size: int, in_pairs: bool) -> list[Any]:
    """`FEATURES` numbers of that many bytes, as vectors that are multiplied one by one."""
    if in_pairs:
        return [_loaded(builder, address, ir.VectorType(_WORD, 2 * _LANES))]
    halves = [address, builder.add(address, address.type(size * _LANES))]
    if size == 4:
        return [_loaded(builder, half, _VECTOR) for half in halves]
    return [_widened(builder, _loaded(builder, half, ir.VectorType(_WORD, _LANES))) for half in halves]


def _added(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """`total + one * other`."""
    if one.type == _VECTOR:
        return _called(builder, f"llvm.fma.v{_LANES}f32", _VECTOR, [one, other, total])
    halves = ir.VectorType(_Bfloat(), 2 * _LANES)
    pairs = [builder.bitcast(each, halves) for each in (one, other)]
    return _called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, [total, *pairs])


def _generate(rows: int, input_size: int, weight_size: int, builder: Any, arguments: Any) -> None:
    """See `tile`; sizes are bytes of a number."""
    input, row_bytes, last, *columns, length, first, second, third, output_bytes = arguments
    number, lowering, in_pairs = input.type, cast(Any, cgutils), input_size == 2
    # Where there are fewer rows than the tile has, the last is multiplied again.
    row_indices = [
        builder.select(builder.icmp_signed("<", number(row), last), number(row), last) for row in range(rows)
    ]
    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
    sums = [[lowering.alloca_once_value(builder, zero) for _ in columns] for _ in row_indices]
    with lowering.for_range_slice(builder, number(0), length, number(FEATURES), number) as (feature, _):
        to_input, to_weight = (builder.mul(feature, number(size)) for size in (input_size, weight_size))
        addresses = [builder.add(column, to_weight) for column in columns]
        weights = [_vectors(builder, address, weight_size, in_pairs) for address in addresses]
        for address in addresses:
            for line in range(_AHEAD, _AHEAD + FEATURES * weight_size, 64):
                ahead = builder.inttoptr(builder.add(address, number(line)), ir.IntType(8).as_pointer())
                _called(builder, "llvm.prefetch.p0i8", ir.VoidType(), [ahead, _INT(0), _INT(3), _INT(1)])
        for row_index, row in zip(row_indices, sums, strict=True):
            start = builder.add(input, builder.mul(row_index, row_bytes))
            vectors = _vectors(builder, builder.add(start, to_input), input_size, in_pairs)
            for total, weight in zip(row, weights, strict=True):
                for pair in zip(vectors, weight, strict=True):
                    builder.store(_added(builder, builder.load(total), *pair), total)
    for row_index, row in zip(row_indices, sums, strict=True):
        for output, total in zip((first, second, third), row, strict=True):
            lanes = [_FLOAT(0.0), builder.load(total)]
            reduced = _called(builder, f"llvm.vector.reduce.fadd.v{_LANES}f32", _FLOAT, lanes, fastmath=("reassoc",))
            address = builder.add(output, builder.mul(row_index, output_bytes))
            builder.store(reduced, builder.inttoptr(address, _FLOAT.as_pointer()))


def tile(rows: int) -> Any:
    """A function for compiled loops: the products of at most `rows` rows of an input with `COLUMNS` of a weight, over
    the first `length` features, a multiple of `FEATURES`. All is given by addresses: the first row of the input, how
    many bytes the rows are apart, and the number of the last; the rows of the weight; for each of these its first
    output, in fp32, and how many bytes the outputs are apart. `one` is a number of the input and `other` one of the
    weight: both fp32, or bfloat16 (as uint16) where there are `PAIRS`, else fp32 and bfloat16.
    """

    def typed(
        _context: Any,
        one: Any,
        other: Any,
        input: Any,
        row_bytes: Any,
        last: Any,
        a: Any,
        b: Any,
        c: Any,
        length: Any,
        to_a: Any,
        to_b: Any,
        to_c: Any,
        output_bytes: Any,
    ) -> Any:
        one_size, other_size = (4 if number == types.float32 else 2 for number in (one, other))

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _generate(rows, one_size, other_size, builder, arguments[2:])
            return context.get_dummy_value()

        numbers = (input, row_bytes, last, a, b, c, length, to_a, to_b, to_c, output_bytes)
        return types.void(one, other, *(types.intp for _ in numbers)), generate

    return intrinsic(typed)
