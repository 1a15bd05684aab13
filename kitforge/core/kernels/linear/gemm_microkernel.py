"""GEMM microkernel of `linear` for few rows: a tile of input rows by weight rows in vector registers.

Written in LLVM instructions, since LLVM's own vectorizer does not keep all sums in registers.
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
# Whether the processor has dot products of bfloat16 pairs.
PAIRS = "+avx512bf16" in _FEATURES
_LANES = 16 if _WIDE else 8
# Rows of the input by rows of the weight in a tile: as many sums as there are registers.
ROWS, COLUMNS = 8 if _WIDE else 4, 3
# Features of one iteration; the caller handles the remainder.
FEATURES = 2 * _LANES
# Prefetch distance in bytes. Rows of a weight are adjacent, so it reaches into the next row.
_AHEAD = 1024

_FLOAT, _INT, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR = ir.VectorType(_FLOAT, _LANES)


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite lacks."""

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


def _vectors(builder: Any, address: Any, size: int, in_pairs: bool) -> list[Any]:
    """`FEATURES` numbers of `size` bytes each, as vectors: in fp32, or as bfloat16 pairs."""
    if in_pairs:
        return [_loaded(builder, address, ir.VectorType(_WORD, 2 * _LANES))]
    halves = [address, builder.add(address, address.type(size * _LANES))]
    if size == 4:
        return [_loaded(builder, half, _VECTOR) for half in halves]
    wide = ir.VectorType(_INT, _LANES)
    words = [builder.zext(_loaded(builder, half, ir.VectorType(_WORD, _LANES)), wide) for half in halves]
    return [builder.bitcast(builder.shl(each, ir.Constant(wide, [16] * _LANES)), _VECTOR) for each in words]


def _added(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """`total + one * other`."""
    if one.type == _VECTOR:
        return _called(builder, f"llvm.fma.v{_LANES}f32", _VECTOR, [one, other, total])
    halves = ir.VectorType(_Bfloat(), 2 * _LANES)
    pairs = [builder.bitcast(each, halves) for each in (one, other)]
    return _called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, [total, *pairs])


def _generate(rows: int, input_size: int, weight_size: int, builder: Any, arguments: Any) -> None:
    """See `tile`; sizes are bytes of an element."""
    input, row_bytes, last, *columns, length, first, second, third, output_bytes = arguments
    number, lowering, in_pairs = input.type, cast(Any, cgutils), input_size == 2
    # With fewer rows than the tile has, the last is multiplied again.
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
    """An intrinsic: products of at most `rows` rows of an input with `COLUMNS` rows of a weight, over the first
    `length` features, a multiple of `FEATURES`.

    Arguments are addresses: the first row of the input, its stride in bytes and the index of the last row; the rows of
    the weight; the first fp32 output of each and their stride in bytes. `one` has the element type of the input and
    `other` that of the weight: both fp32, both bfloat16 (as uint16) with `PAIRS`, else fp32 and bfloat16.
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
