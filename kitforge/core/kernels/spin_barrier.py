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

from kitforge.core.kernels.numba_runtime import compiled, run_on_two_threads
from kitforge.core.kernels.threads import num_threads

BYTES_PER_PHASE = 128
# Looks at a count before the processor is offered to others; some hundred microseconds.
_MAX_SPINS = 2**12
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def _increased(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.intp), generate


def _read(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.intp), generate


def _call_without_result(name: str) -> Any:
    def typed(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cast(Any, cgutils).get_or_insert_function(builder.module, kind, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(typed)


_fetch_add: Any = intrinsic(_increased)
_atomic_load: Any = intrinsic(_read)
_pause: Any = _call_without_result("llvm.x86.sse2.pause" if _IS_X86 else "sched_yield")
_yield_processor: Any = _call_without_result("sched_yield")


@compiled
def next_chunk(phase: int) -> Any:
    """The next piece of a phase, from 0; there may not be as many."""
    return _fetch_add(phase)


@compiled
def finish(phase: int) -> Any:
    """Say that a piece is done, and take the next."""
    _fetch_add(phase + 64)
    return _fetch_add(phase)


@compiled
def barrier(phase: int, num_chunks: int) -> Any:
    """Wait until all pieces are done; the next phase."""
    num_polls = 0
    while _atomic_load(phase + 64) < num_chunks:
        num_polls += 1
        if num_polls < _MAX_SPINS:
            _pause()
        else:
            _yield_processor()
    return phase + BYTES_PER_PHASE


@final
class ThreadAutotuner:
    """Calls with a second thread or without, whichever was faster for calls of their kind. Where other processes want
    the processors, threads that meet wait for those too. It changes no result.

    First both ways are tried in turn; later, now and then the one that is slower.
    """

    NUM_TRIALS, RETRY_INTERVAL = 8, 64

    def __init__(self) -> None:
        self._num_calls: dict[Hashable, int] = {}
        self._seconds: dict[tuple[Hashable, bool], float] = {}

    def call(self, signature: Hashable, work: Callable[[], Any]) -> None:
        """`work` shares what there is to do with whoever calls it as well."""
        if num_threads() == 1 or os.cpu_count() == 1:
            work()
            return
        number = self._num_calls[signature] = self._num_calls.get(signature, 0) + 1
        is_regular = number > self.NUM_TRIALS and number % self.RETRY_INTERVAL > 0
        choice = (signature, self._uses_two_threads(signature, number))
        start = time.perf_counter()
        run_on_two_threads(work) if choice[1] else work()
        seconds = time.perf_counter() - start
        before = self._seconds.get(choice, seconds)
        if number <= self.NUM_TRIALS:
            self._seconds[choice] = min(before, seconds)
        else:
            self._seconds[choice] = 0.8 * before + 0.2 * seconds if is_regular else seconds

    def _uses_two_threads(self, kind: Hashable, number: int) -> bool:
        if number <= self.NUM_TRIALS:
            return number % 2 == 0
        is_faster = self._seconds[kind, True] < self._seconds[kind, False]
        return is_faster if number % self.RETRY_INTERVAL else not is_faster
