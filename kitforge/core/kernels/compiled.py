"""Loops that numba compiles, and the threads that share them. Nothing imports this where numba is not installed."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from kitforge.core.kernels.threads import num_threads

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code, made at its first call, that lets other threads run meanwhile.

    Products and sums are not fused nor sums reordered, so that a loop has the bits of its reference. What was compiled
    is kept beside the source, as Python keeps its own bytecode; where no folder can be written, it is compiled anew in
    each process. A change in a function that another one calls is noticed only within one file.
    """
    made: Any = njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):
        made._cache = _Kept(function)  # type: ignore[no-untyped-call]
    return cast(Function, made)


class _Kept(FunctionCache):
    """numba's files of compiled functions, read and written by one process at a time.

    Left to itself, numba 0.68 may give two signatures that two processes compile at once the same file (the index is
    read, added to and written back without a lock), and from then on calls one for the other.
    """

    def _load_overload(self, *signature: Any) -> Any:
        with self._alone():
            return super()._load_overload(*signature)  # type: ignore[no-untyped-call]

    def _save_overload(self, *compiled: Any) -> None:
        with self._alone():
            super()._save_overload(*compiled)  # type: ignore[no-untyped-call]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        folder = os.open(self.cache_path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            # A process forked meanwhile has the handle too: closing it here would not let go of the lock.
            fcntl.flock(folder, fcntl.LOCK_UN)
            os.close(folder)


def _prefetch(_context: Any, array: Any, _row: Any, _column: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, lowering = signature.args[0], cast(Any, cgutils)
        made = context.make_array(kind)(context, builder, arguments[0])
        address = lowering.get_item_pointer(context, builder, kind, made, list(arguments[1:]))
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        asked = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = lowering.get_or_insert_function(builder.module, asked, "llvm.prefetch.p0i8")
        # To read, to be kept in all levels, data.
        how = [ir.Constant(number, each) for each in (0, 3, 1)]
        builder.call(function, [builder.bitcast(address, pointer), *how])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


# Within a compiled loop, `prefetch(array, row, column)` asks for the line of memory that this number is in.
prefetch: Any = intrinsic(_prefetch)


def share(work: Callable[[int, int], Any], count: int, grain: int) -> list[Any]:
    """What `work(start, stop)` returns for pieces of range(count), in order; one piece a thread, none below `grain`.

    There are as many threads as torch has, or fewer while another thread works beside. Where a piece begins must not
    change a bit of what it does. numba's own threads are not used: of several callers at once, which a prefetcher
    makes, its portable kind dies.
    """
    num_pieces = max(1, min(num_threads(), count // max(grain, 1)))
    if num_pieces == 1:
        return [work(0, count)]
    bounds = [count * piece // num_pieces for piece in range(num_pieces + 1)]
    # A forked process has none of the threads of its parent.
    pool = _pool(os.getpid(), num_pieces - 1)
    pieces = list(zip(bounds[1:-1], bounds[2:], strict=True))
    others = [pool.submit(work, *piece) for piece in pieces]
    results = [work(*bounds[:2])]
    # A piece that no thread has begun, since other callers keep them busy, is done here.
    for piece, other in zip(pieces, others, strict=True):
        results.append(work(*piece) if other.cancel() else other.result())
    return results


@functools.cache
def _pool(_process: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")
