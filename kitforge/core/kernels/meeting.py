"""Threads that share the pieces of one compiled call after another's, and meet in between without going to sleep.

For each phase of the call there is a line of memory that counts the pieces that were taken, and one that counts those
that are done. A thread takes pieces until there are none, and goes on when all are done; one that comes late finds
nothing left to do and catches up. Memory of this kind is zero at the start, `ROOM` bytes a phase.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable
from typing import Any, cast, final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kitforge.core.kernels.compiled import compiled, together
from kitforge.core.kernels.threads import num_threads

ROOM = 128
# Looks at a count before the processor is offered to others; some hundred microseconds.
_PATIENCE = 2**12
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _increased(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        place = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.intp), generate


def _read(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.intp), generate


def _told(name: str) -> Any:
    def typed(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cast(Any, cgutils).get_or_insert_function(builder.module, kind, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(typed)


_increase: Any = intrinsic(_increased)
_count: Any = intrinsic(_read)
_pause: Any = _told("llvm.x86.sse2.pause" if _IS_X86 else "sched_yield")
_give_way: Any = _told("sched_yield")


@compiled
def take(phase: int) -> Any:
    """The next piece of a phase, from 0; there may not be as many."""
    return _increase(phase)


@compiled
def done(phase: int) -> Any:
    """Say that a piece is done, and take the next."""
    _increase(phase + 64)
    return _increase(phase)


@compiled
def meet(phase: int, num_pieces: int) -> Any:
    """Wait until all pieces are done; the next phase."""
    looks = 0
    while _count(phase + 64) < num_pieces:
        looks += 1
        if looks < _PATIENCE:
            _pause()
        else:
            _give_way()
    return phase + ROOM


@final
class Company:
    """Calls with a second thread or without, whichever was faster for calls of their kind. Where other processes want
    the processors, threads that meet wait for those too. It changes no result.

    First both ways are tried in turn; later, now and then the one that is slower.
    """

    TRIED, OFTEN = 8, 64

    def __init__(self) -> None:
        self._num_calls: dict[Hashable, int] = {}
        self._seconds: dict[tuple[Hashable, bool], float] = {}

    def call(self, kind: Hashable, work: Callable[[], Any]) -> None:
        """`work` shares what there is to do with whoever calls it as well."""
        if num_threads() == 1 or os.cpu_count() == 1:
            work()
            return
        number = self._num_calls[kind] = self._num_calls.get(kind, 0) + 1
        is_regular = number > self.TRIED and number % self.OFTEN > 0
        way = (kind, self._is_shared(kind, number))
        start = time.perf_counter()
        together(work) if way[1] else work()
        seconds = time.perf_counter() - start
        before = self._seconds.get(way, seconds)
        if number <= self.TRIED:
            self._seconds[way] = min(before, seconds)
        else:
            self._seconds[way] = 0.8 * before + 0.2 * seconds if is_regular else seconds

    def _is_shared(self, kind: Hashable, number: int) -> bool:
        if number <= self.TRIED:
            return number % 2 == 0
        is_faster = self._seconds[kind, True] < self._seconds[kind, False]
        return is_faster if number % self.OFTEN else not is_faster
