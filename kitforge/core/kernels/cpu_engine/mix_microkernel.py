"""Microkernel of attention: sums of rows that lie anywhere in memory, weighted by several queries, in vector registers.

Rows are read where they are, so nothing is packed. Every sum runs over the rows in order, in fp32, so a query has the
same bits whatever queries are beside it. Written in LLVM instructions, as `gemm_microkernel`.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL, ROWS, plus_products, widened_words
from kitforge.core.kernels.cpu_engine.numba_runtime import compiled_fastmath, intrinsic, lowering
from kitforge.core.kernels.cpu_engine.vectors import LANES, called, on_all_lanes, pointer_to

_FLOAT, _INT, _HALF, _BIT = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(1)
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


def _read(builder: Any, address: Any, kind: Any, mask: Any) -> Any:
    """A vector from memory, of which only the elements of the mask are read; without one, all."""
    pointer = pointer_to(builder, address, kind)
    if mask is None:
        loaded = builder.load(pointer)
        loaded.align = 2
        return loaded
    size = kind.element.width if isinstance(kind.element, ir.IntType) else 32
    name = f"llvm.masked.load.v{kind.count}{'f' if kind.element == _FLOAT else 'i'}{size}.p0"
    return called(builder, name, kind, [pointer, _INT(2), mask, ir.Constant(kind, None)])


def _row(builder: Any, address: Any, size: int, mask: Any) -> list[Any]:
    """`PANEL` features of a row in fp32: two vectors of adjacent ones or, in bfloat16, of the even and the odd ones."""
    if size == 2:
        words = _read(builder, address, ir.VectorType(_HALF, PANEL), mask)
        return widened_words(builder, builder.bitcast(words, _WORDS))
    parts = []
    for half in range(2):
        own = None
        if mask is not None:
            order = ir.Constant(ir.VectorType(_INT, LANES), list(range(LANES * half, LANES * (half + 1))))
            own = builder.shuffle_vector(mask, mask, order)
        parts.append(_read(builder, builder.add(address, address.type(4 * LANES * half)), _VECTOR, own))
    return parts


def _mask(builder: Any, width: Any) -> Any:
    """The first `width` of `PANEL` elements."""
    kind = ir.VectorType(_INT, PANEL)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.trunc(width, _INT), _INT(0))
    limit = builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * PANEL))
    return builder.icmp_unsigned("<", ir.Constant(kind, list(range(PANEL))), limit)


def _add_rows(builder: Any, size: int, sums: list[list[Any]], starts: list[Any], arguments: Any, mask: Any) -> None:
    table, base, count = arguments
    number = base.type
    with lowering.for_range_slice(builder, number(0), count, number(1), number) as (index, _):
        offset = builder.load(pointer_to(builder, builder.add(table, builder.mul(index, number(8))), number))
        vectors = _row(builder, builder.add(base, offset), size, mask)
        for start, totals in zip(starts, sums, strict=True):
            weight = builder.load(pointer_to(builder, builder.add(start, builder.mul(index, number(4))), _FLOAT))
            weight.align = 4
            factor = on_all_lanes(builder, weight)
            for total, vector in zip(totals, vectors, strict=True):
                builder.store(plus_products(builder, builder.load(total), factor, vector), total)


def _generate(num_queries: int, size: int, builder: Any, arguments: Any) -> None:
    """See `_mix`; `size` is bytes of an element of the rows."""
    weights, weight_bytes, last, table, base, count, width, output = arguments
    number = weights.type
    # With fewer queries, the last is summed again.
    indices = [
        builder.select(builder.icmp_signed("<", number(each), last), number(each), last) for each in range(num_queries)
    ]
    starts = [builder.add(weights, builder.mul(index, weight_bytes)) for index in indices]
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    sums = [[lowering.alloca_once_value(builder, zero) for _ in range(2)] for _ in indices]
    with builder.if_else(builder.icmp_signed("==", width, number(PANEL))) as (is_whole, is_part):
        with is_whole:
            _add_rows(builder, size, sums, starts, (table, base, count), None)
        with is_part:
            _add_rows(builder, size, sums, starts, (table, base, count), _mask(builder, width))
    for index, totals in zip(indices, sums, strict=True):
        one, other = (builder.load(total) for total in totals)
        if size == 2:
            orders = [[LANES * (k % 2) + k // 2 for k in range(first, first + LANES)] for first in (0, LANES)]
            one, other = (builder.shuffle_vector(one, other, ir.Constant(_WORDS, order)) for order in orders)
        for half, result in enumerate((one, other)):
            target = builder.add(output, builder.mul(index, number(4 * PANEL)))
            builder.store(result, pointer_to(builder, target, _VECTOR, 4 * LANES * half)).align = 4


def _mix(num_queries: int) -> Any:
    """See `mix`, for at most `num_queries` queries; `last` is the index of the last one."""

    def typed(
        _context: Any,
        like: Any,
        _weights: Any,
        _weight_bytes: Any,
        _last: Any,
        _table: Any,
        _base: Any,
        _count: Any,
        _width: Any,
        _output: Any,
    ) -> Any:
        size = 4 if like == types.float32 else 2

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _generate(num_queries, size, builder, arguments[1:])
            return context.get_dummy_value()

        return types.void(like, *(types.intp for _ in range(8))), generate

    return intrinsic(typed)


_all, _four, _one = (_mix(each) for each in (ROWS, 4, 1))


@compiled_fastmath
def mix(
    like: Any,
    weights: int,
    weight_bytes: int,
    num_queries: int,
    table: int,
    base: int,
    count: int,
    width: int,
    output: int,
) -> None:
    """Write to output, fp32 [queries, `PANEL`], the sums of the first `width` numbers of `count` rows of the type of
    `like`, which begin at `base` and the offsets (int64) at `table`. The weights of a query are fp32, adjacent, and
    `weight_bytes` behind those of the query before."""
    for query in range(0, num_queries, ROWS):
        own, target, last = (
            weights + query * weight_bytes,
            output + 4 * PANEL * query,
            min(num_queries - query, ROWS) - 1,
        )
        if last >= 4:
            _all(like, own, weight_bytes, last, table, base, count, width, target)
        elif last:
            _four(like, own, weight_bytes, last, table, base, count, width, target)
        else:
            _one(like, own, weight_bytes, 0, table, base, count, width, target)
