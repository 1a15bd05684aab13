"""Spin barrier and atomic work counters for two threads inside one compiled call.

Each phase of a call has two counters, each in its own cache line: chunks taken and chunks finished. A thread takes
chunks until none are left and waits until all are finished; a late thread finds none and catches up. The memory,
`BYTES_PER_PHASE` a phase, must be zero at the start.
"""

import os
import platform
import time
from collections.abc import Callable, Hashable
from typing import Any

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, intrinsic, lowering, run_on_threads
from kitforge.core.kernels.cpu_engine.threads import num_threads

BYTES_PER_PHASE = 128
# Polls of a counter before the thread yields the processor; some hundred microseconds.
_MAX_SPINS = 2**12
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


@intrinsic
def _fetch_add(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], number.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(number, 1), "seq_cst")

    return types.int64(types.intp), generate


@intrinsic
def _atomic_load(_context: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.intp), generate


def _call_without_result(name: str) -> Any:
    def typed(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(lowering.get_or_insert_function(builder.module, kind, name), [])
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(typed)


_pause: Any = _call_without_result("llvm.x86.sse2.pause" if _IS_X86 else "sched_yield")
_yield_processor: Any = _call_without_result("sched_yield")


@compiled
def next_chunk(phase: int) -> Any:
    """The next chunk of a phase, from 0; at or above the number of chunks, none is left."""
    return _fetch_add(phase)


@compiled
def finish(phase: int) -> Any:
    """Count a chunk as finished and take the next one."""
    _fetch_add(phase + 64)
    return _fetch_add(phase)


@compiled
def barrier(phase: int, num_chunks: int) -> Any:
    """Wait until all chunks are finished. Returns the next phase."""
    num_polls = 0
    while _atomic_load(phase + 64) < num_chunks:
        num_polls += 1
        if num_polls < _MAX_SPINS:
            _pause()
        else:
            _yield_processor()
    return phase + BYTES_PER_PHASE


class ThreadAutotuner:
    """Measures one and two threads per call signature and uses the faster; results are the same.

    Two threads are slower where other processes need the cores, since each waits for the other. The first calls try
    both in turn; later ones retry the slower one now and then. The median of the latest calls decides, so that another
    process in one or two of them changes nothing.
    """

    NUM_TRIALS, RETRY_INTERVAL, NUM_LATEST = 8, 64, 5

    def __init__(self) -> None:
        self._is_single_core = os.cpu_count() == 1
        self._num_calls: dict[Hashable, int] = {}
        self._seconds: dict[tuple[Hashable, bool], list[float]] = {}  # of the latest calls

    def call(self, signature: Hashable, work: Callable[[], Any]) -> None:
        """Run `work`, which shares its chunks with a concurrent call of itself."""
        if num_threads() == 1 or self._is_single_core:
            work()
            return
        number = self._num_calls[signature] = self._num_calls.get(signature, 0) + 1
        choice = (signature, self._uses_two_threads(signature, number))
        start = time.perf_counter()
        run_on_threads(work, 2) if choice[1] else work()
        seconds = time.perf_counter() - start
        is_retry = number > self.NUM_TRIALS and number % self.RETRY_INTERVAL == 0
        before = [] if is_retry else self._seconds.get(choice, [])
        self._seconds[choice] = [*before, seconds][-self.NUM_LATEST :]

    def _uses_two_threads(self, kind: Hashable, number: int) -> bool:
        if number <= self.NUM_TRIALS:
            return number % 2 == 0
        is_faster = _median(self._seconds[kind, True]) < _median(self._seconds[kind, False])
        return is_faster if number % self.RETRY_INTERVAL else not is_faster


def _median(numbers: list[float]) -> float:
    """The lower one of an even number."""
    return sorted(numbers)[(len(numbers) - 1) // 2]
