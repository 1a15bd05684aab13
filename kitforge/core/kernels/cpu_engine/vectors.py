"""Vectors of `LANES` fp32 numbers, as values of a compiled loop.

LLVM unrolls a short loop of constant length into single numbers, takes half of a wide register for the others, and may
fuse products with sums differently in each caller. Here a vector is a register, and every rounding is written down: a
row has the same bits wherever a loop is inlined.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from kitforge.core.kernels.cpu_engine.numba_runtime import (
    FEATURES,
    compiled,
    intrinsic,
    lowering,
    narrowed_bits,
    widened_bits,
)

# Of a vector.
LANES = 16 if "+avx512f" in FEATURES else 8
_FLOAT, _INT, _SHORT = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_SHORTS = ir.VectorType(_SHORT, LANES)
_extending: Any = extending


def called(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The result of an instruction, by its name in LLVM."""
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(lowering.get_or_insert_function(builder.module, kind, name), arguments)


def pointer_to(builder: Any, address: Any, kind: Any, offset: Any = 0) -> Any:
    """A pointer to a type, `offset` bytes behind an address."""
    return builder.inttoptr(builder.add(address, address.type(offset)), kind.as_pointer())


def on_all_lanes(builder: Any, scalar: Any) -> Any:
    """A vector of a number."""
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


class _Vector(types.Type):
    """Of `LANES` fp32 numbers."""

    def __init__(self) -> None:
        super().__init__(name=f"vector{LANES}")


_vector = _Vector()


@_extending.register_model(_Vector)
class _VectorModel(_extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _as_vector(builder: Any, value: Any) -> Any:
    return value if value.type == _VECTOR else on_all_lanes(builder, value)


def _elementwise(generate: Callable[..., Any], count: int) -> Any:
    """An intrinsic: a vector of `count` vectors or numbers, each of which is on all lanes."""

    def result(*kinds: Any) -> Any:
        if not all(kind in (_vector, types.float32) for kind in kinds) or _vector not in kinds:
            return None

        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return generate(builder, *(_as_vector(builder, each) for each in arguments))

        return _vector(*kinds), code

    if count == 2:
        return intrinsic(lambda _context, one, other: result(one, other))
    return intrinsic(lambda _context, one, other, third: result(one, other, third))


def _overload(operation: Any, instruction: str) -> None:
    made = _elementwise(lambda builder, one, other: getattr(builder, instruction)(one, other), 2)

    # Without annotations, which numba compares with those of the implementation.
    _extending.overload(operation)(
        lambda one, other: (lambda one, other: made(one, other)) if _vector in (one, other) else None
    )


for _operation, _name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _overload(_operation, _name)
_overload(operator.truediv, "fdiv")

# `fused(x, y, z)` is x * y + z, rounded once.
fused: Any = _elementwise(lambda builder, x, y, z: called(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [x, y, z]), 3)
# Of two vectors; where the first is NaN it stays so.
larger: Any = _elementwise(lambda builder, x, y: builder.select(builder.fcmp_ordered(">", y, x), y, x), 2)
smaller: Any = _elementwise(lambda builder, x, y: builder.select(builder.fcmp_ordered("<", y, x), y, x), 2)

# The first of two vectors where it is above the second, or NaN, and 0 elsewhere.
above: Any = _elementwise(
    lambda builder, x, y: builder.select(builder.fcmp_unordered(">", x, y), x, ir.Constant(_VECTOR, [0.0] * LANES)), 2
)


@intrinsic
def vector_of(_context: Any, _number: Any) -> Any:
    """`vector_of(number)` holds an fp32 number on all lanes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return on_all_lanes(builder, arguments[0])

    return _vector(types.float32), generate


def _numbers() -> Any:
    return ir.Constant(_WORDS, list(range(LANES)))


@intrinsic
def lane_numbers(_context: Any) -> Any:
    """`lane_numbers()` is 0, 1, 2 and so on."""

    def generate(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return ir.Constant(_VECTOR, [float(lane) for lane in range(LANES)])

    return _vector(), generate


def _is_between(builder: Any, start: Any, stop: Any) -> Any:
    """A mask of the lanes from `start` to `stop` - 1."""
    low, high = (on_all_lanes(builder, builder.trunc(each, _INT)) for each in (start, stop))
    return builder.and_(builder.icmp_signed(">=", _numbers(), low), builder.icmp_signed("<", _numbers(), high))


@intrinsic
def keep_lanes(_context: Any, _values: Any, _start: Any, _stop: Any, _others: Any) -> Any:
    """`keep_lanes(vector, start, stop, others)` has the number `others` on all lanes but those from `start` to `stop`
    - 1, which may lie outside the vector."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values, start, stop, others = arguments
        return builder.select(_is_between(builder, start, stop), values, on_all_lanes(builder, others))

    return _vector(_vector, types.intp, types.intp, types.float32), generate


def _is_float(like: Any) -> bool:
    return bool(like == types.float32)


@intrinsic
def to_precision(_context: Any, _values: Any, like: Any) -> Any:
    """`to_precision(vector, like)` is rounded to the type of `like`: fp32 or bfloat16 (as uint16)."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = arguments[0]
        return values if _is_float(signature.args[1]) else widened_bits(builder, narrowed_bits(builder, values))

    return _vector(_vector, like), generate


@intrinsic
def vector_at(_context: Any, _address: Any, like: Any) -> Any:
    """`vector_at(address, like)` are the numbers there, of the type of `like`."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        is_float = _is_float(signature.args[1])
        loaded = builder.load(pointer_to(builder, arguments[0], _VECTOR if is_float else _SHORTS))
        loaded.align = 4 if is_float else 2
        return loaded if is_float else widened_bits(builder, loaded)

    return _vector(types.intp, like), generate


@intrinsic
def _masked_at(_context: Any, _address: Any, like: Any, _count: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, _, count = arguments
        mask, size = _is_between(builder, count.type(0), count), 4 if _is_float(signature.args[1]) else 2
        kind, name = (_VECTOR, "f32") if size == 4 else (_SHORTS, "i16")
        operands = [pointer_to(builder, address, kind), _INT(size), mask, ir.Constant(kind, None)]
        loaded = called(builder, f"llvm.masked.load.v{LANES}{name}.p0", kind, operands)
        return loaded if size == 4 else widened_bits(builder, loaded)

    return _vector(types.intp, like, types.intp), generate


@intrinsic
def write_vector(_context: Any, _values: Any, _address: Any, like: Any) -> Any:
    """`write_vector(vector, address, like)` rounds the numbers to the type of `like` and writes them there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, address, _ = arguments
        is_float = _is_float(signature.args[2])
        kept = values if is_float else narrowed_bits(builder, values)
        builder.store(kept, pointer_to(builder, address, kept.type)).align = 4 if is_float else 2
        return context.get_dummy_value()

    return types.void(_vector, types.intp, like), generate


@intrinsic
def _write_masked(_context: Any, _values: Any, _address: Any, like: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, address, _, count = arguments
        size = 4 if _is_float(signature.args[2]) else 2
        kept, name = (values, "f32") if size == 4 else (narrowed_bits(builder, values), "i16")
        mask = _is_between(builder, count.type(0), count)
        operands = [kept, pointer_to(builder, address, kept.type), _INT(size), mask]
        called(builder, f"llvm.masked.store.v{LANES}{name}.p0", ir.VoidType(), operands)
        return context.get_dummy_value()

    return types.void(_vector, types.intp, like, types.intp), generate


# A processor without masks takes as long for each lane of one.
@compiled
def part_at(address: int, like: Any, count: int) -> Any:
    """The first `count` numbers at an address, of any count, and 0 on the other lanes."""
    return vector_at(address, like) if count >= LANES else _masked_at(address, like, count)


@compiled
def write_part(values: Any, address: int, like: Any, count: int) -> None:
    """Write the first `count` numbers of a vector, of any count, rounded to the type of `like`."""
    if count >= LANES:
        write_vector(values, address, like)
    else:
        _write_masked(values, address, like, count)


def _reduced(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic: the lanes of a vector combined, those of its halves first."""

    def typed(_context: Any, _values: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            values, width = arguments[0], LANES
            while width > 1:
                width //= 2
                moved = [(lane + width) % LANES for lane in range(LANES)]
                other = builder.shuffle_vector(values, values, ir.Constant(_WORDS, moved))
                values = combine(builder, values, other)
            return builder.extract_element(values, _INT(0))

        return types.float32(_vector), generate

    return intrinsic(typed)


# The sum of a vector, and its largest number.
sum_of: Any = _reduced(lambda builder, one, other: builder.fadd(one, other))
largest_of: Any = _reduced(
    lambda builder, one, other: builder.select(builder.fcmp_ordered(">", other, one), other, one)
)


@intrinsic
def _floor(_context: Any, _values: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return called(builder, f"llvm.floor.v{LANES}f32", _VECTOR, [arguments[0]])

    return _vector(_vector), generate


@intrinsic
def _powers_of_two(_context: Any, _values: Any) -> Any:
    """2**n in fp32 for whole numbers from -126 to 127."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        whole = builder.add(builder.fptosi(arguments[0], _WORDS), ir.Constant(_WORDS, [127] * LANES))
        return builder.bitcast(builder.shl(whole, ir.Constant(_WORDS, [23] * LANES)), _VECTOR)

    return _vector(_vector), generate


_LOG2_E, _HALF, _SMALLEST = np.float32(math.log2(math.e)), np.float32(0.5), np.float32(-126)
# Taylor series of 2**x; from -1/2 to 1/2 its error is below the precision of fp32.
_TERMS = tuple(np.float32(math.log(2) ** power / math.factorial(power)) for power in range(8))


@compiled
def powers_of_e(values: Any) -> Any:
    """e**x in fp32 for numbers of at most 88. Results are at least 2**-126."""
    power = larger(values * _LOG2_E, _SMALLEST)
    whole = _floor(power + _HALF)
    x = power - whole
    series = fused(x, _TERMS[7], _TERMS[6])
    for term in (_TERMS[5], _TERMS[4], _TERMS[3], _TERMS[2], _TERMS[1], _TERMS[0]):
        series = fused(series, x, term)
    return series * _powers_of_two(whole)


_LARGEST = np.float32(88)


@compiled
def times_sigmoid(values: Any, power: Any) -> Any:
    """`values / (1 + e**-power)`."""
    return values / (powers_of_e(smaller(np.float32(0) - power, _LARGEST)) + np.float32(1))
