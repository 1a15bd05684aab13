"""Loops that numba compiles, and the threads that share them. Nothing imports this where numba is not installed."""

from __future__ import annotations

import fcntl
import functools
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from kitforge.core.kernels.threads import num_threads

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code, made at its first call, that lets other threads run meanwhile.

    Products and sums are not fused nor sums reordered, so that a loop has the bits of its reference. What was compiled
    is kept beside the source, as Python keeps its own bytecode; where no folder can be written, it is compiled anew in
    each process. A change in a function that another one calls is noticed only within one file.
    """
    return _compile(function, False)


def compiled_fastmath(function: Function) -> Function:
    """The same for loops whose sums may be reordered, so that they fill the processor's vectors. What is not a number
    or not finite still shows."""
    return _compile(function, {"reassoc", "contract", "nsz", "arcp"})


def _compile(function: Function, fastmath: bool | set[str]) -> Function:
    make: Any = njit(nogil=True, error_model="numpy", fastmath=fastmath)
    made = make(function)
    with suppress(RuntimeError):
        made._cache = _LockedFunctionCache(function)  # type: ignore[no-untyped-call]
    return cast(Function, made)


class _LockedFunctionCache(FunctionCache):
    """numba's files of compiled functions, read and written by one process at a time.

    Left to itself, numba 0.68 may give two signatures that two processes compile at once the same file (the index is
    read, added to and written back without a lock), and from then on calls one for the other.
    """

    def _load_overload(self, *signature: Any) -> Any:
        with self._locked():
            return super()._load_overload(*signature)  # type: ignore[no-untyped-call]

    def _save_overload(self, *compiled: Any) -> None:
        with self._locked():
            super()._save_overload(*compiled)  # type: ignore[no-untyped-call]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self.cache_path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            # A process forked meanwhile has the handle too: closing it here would not let go of the lock.
            fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)


def _pointer(_context: Any, _address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    to_kind: Any = types.CPointer
    return to_kind(like)(types.intp, like), generate


_pointer_to: Any = intrinsic(_pointer)
# What arrays at an address are of: fp32, or bfloat16, which comes as uint16 (see `widened`).
FLOAT: Any = np.float32(0)
HALF: Any = np.uint16(0)


@compiled
def array_at(address: int, shape: Any, like: Any) -> Any:
    """Within a compiled loop, the array at an address, of numbers like this one. An address is handed over in a tenth
    of the time of an array."""
    return carray(_pointer_to(address, like), shape)


@compiled
def float32_at(address: int, shape: Any) -> Any:
    """The same for fp32."""
    return array_at(address, shape, np.float32(0))


@compiled
def int64_at(address: int, shape: Any) -> Any:
    """The same for int64."""
    return array_at(address, shape, np.int64(0))


def _widened(_context: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[0] == types.float32:
            return arguments[0]
        wide = ir.IntType(32)
        bits = builder.shl(builder.zext(arguments[0], wide), ir.Constant(wide, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(number), generate


# Within a compiled loop, `widened(number)` is the fp32 number of a bfloat16 that came as uint16, or of fp32 itself.
widened: Any = intrinsic(_widened)


def _narrowed(_context: Any, _number: Any, like: Any) -> Any:
    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.args[1] == types.float32:
            return arguments[0]
        wide, short = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(arguments[0], wide)
        to_even = builder.and_(builder.lshr(bits, wide(16)), wide(1))
        rounded = builder.trunc(builder.lshr(builder.add(bits, builder.add(to_even, wide(0x7FFF))), wide(16)), short)
        is_none = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        return builder.select(is_none, short(0x7FC0), rounded)

    return (types.float32 if like == types.float32 else types.uint16)(types.float32, like), generate


# Within a compiled loop, `narrowed(number, like)` is the fp32 number as `like` is: itself, or the nearest bfloat16.
narrowed: Any = intrinsic(_narrowed)


@compiled_fastmath
def rounded(number: Any, like: Any) -> Any:
    """Within a compiled loop, the fp32 number as near as numbers like this one come to it."""
    return widened(narrowed(number, like))


def _power_of_two(_context: Any, _exponent: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(32)
        bits = builder.shl(builder.add(arguments[0], ir.Constant(wide, 127)), ir.Constant(wide, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


# Within a compiled loop, `power_of_two(n)` is 2**n in fp32 for n of int32 from -126 to 127.
power_of_two: Any = intrinsic(_power_of_two)


def _prefetch(_context: Any, array: Any, _row: Any, _column: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, lowering = signature.args[0], cast(Any, cgutils)
        made = context.make_array(kind)(context, builder, arguments[0])
        address = lowering.get_item_pointer(context, builder, kind, made, list(arguments[1:]))
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = lowering.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
        # To read, to be kept in all levels, data.
        how = [ir.Constant(number, each) for each in (0, 3, 1)]
        builder.call(function, [builder.bitcast(address, pointer), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


# Within a compiled loop, `prefetch(array, row, column)` asks for the line of memory that this number is in.
prefetch: Any = intrinsic(_prefetch)


_LOG2_E = np.float32(1.4426950408889634)
_HALF = np.float32(0.5)
_SMALLEST = np.float32(-126)
# Taylor's series of 2**x, which from -1/2 to 1/2 is off by less than fp32 is fine.
_TERMS = tuple(np.float32(math.log(2) ** power / math.factorial(power)) for power in range(8))


@compiled_fastmath
def exponential(number: Any) -> Any:
    """e**number in fp32 for numbers of at most 88, so written that a loop over it fills the processor's vectors. What
    is below 2**-126 comes as that."""
    power = number * _LOG2_E
    power = _SMALLEST if power < _SMALLEST else power
    integer = np.floor(power + _HALF)
    x = power - integer
    series = _TERMS[7]
    for term in (_TERMS[6], _TERMS[5], _TERMS[4], _TERMS[3], _TERMS[2], _TERMS[1], _TERMS[0]):
        series = series * x + term
    return series * power_of_two(np.int32(integer))


def parallel_for(work: Callable[[int, int], Any], count: int, grain: int) -> list[Any]:
    """What `work(start, stop)` returns for pieces of range(count), in order; one piece a thread, none below `grain`.

    There are as many threads as torch has, or fewer while another thread works beside. Where a piece begins must not
    change a bit of what it does. numba's own threads are not used: of several callers at once, which a prefetcher
    makes, its portable kind dies.
    """
    num_chunks = max(1, min(num_threads(), count // max(grain, 1)))
    if num_chunks == 1:
        return [work(0, count)]
    bounds = [count * chunk // num_chunks for chunk in range(num_chunks + 1)]
    # A forked process has none of the threads of its parent.
    pool = _pool(os.getpid(), num_chunks - 1)
    chunks = list(zip(bounds[1:-1], bounds[2:], strict=True))
    futures = [pool.submit(work, *chunk) for chunk in chunks]
    results = [work(*bounds[:2])]
    # A piece that no thread has begun, since other callers keep them busy, is done here.
    for chunk, other in zip(chunks, futures, strict=True):
        results.append(work(*chunk) if other.cancel() else other.result())
    return results


def run_on_two_threads(work: Callable[[], Any]) -> None:
    """Call `work` on this thread, and on another if there is a free one. They share what there is to do; the one that
    comes late may find nothing."""
    future = _pool(os.getpid(), 1).submit(work)
    work()
    if not future.cancel():
        future.result()


@functools.cache
def _pool(_process: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")
