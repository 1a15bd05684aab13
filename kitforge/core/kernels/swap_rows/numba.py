"""`swap_rows` in one pass with prefetching and without a buffer of rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for, prefetch_row
from kitforge.core.kernels.swap_rows.reference import require_pairs

# Elements per thread, at least.
GRAIN = 2**14
# Prefetch distance in pairs: rows are scattered, so memory latency dominates.
AHEAD = 8

Floats = NDArray[Any]
Indices = NDArray[np.int64]


def swap_rows(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
    require_pairs(one, other, at, to)
    pairs = (one.numpy(), other.numpy(), at.numpy(), to.numpy())
    parallel_for(lambda start, stop: _swap(*pairs, start, stop), len(at), GRAIN // max(one.shape[1], 1))


@compiled
def _swap(one: Floats, other: Floats, at: Indices, to: Indices, start: int, stop: int) -> None:
    for number in range(start, stop):
        if number + AHEAD < stop:
            prefetch_row(one, at[number + AHEAD], one.shape[1])
            prefetch_row(other, to[number + AHEAD], one.shape[1])
        here, there = one[at[number]], other[to[number]]
        for column in range(one.shape[1]):
            here[column], there[column] = there[column], here[column]
