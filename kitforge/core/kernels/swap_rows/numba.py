"""`swap_rows` in one pass: both rows of a pair are asked for ahead, and no row lies in between."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.numba_runtime import compiled, parallel_for, prefetch
from kitforge.core.kernels.swap_rows.reference import require_pairs

# Numbers that are worth a thread.
GRAIN = 2**14
# How many pairs ahead one is asked for: rows lie anywhere, and memory answers late.
AHEAD = 8

Floats = NDArray[Any]
Indices = NDArray[np.int64]


def swap_rows(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
    """See `SwapRowsKernel`."""
    require_pairs(one, other, at, to)
    pairs = (one.numpy(), other.numpy(), at.numpy(), to.numpy())
    parallel_for(lambda start, stop: _swap(*pairs, start, stop), len(at), GRAIN // max(one.shape[1], 1))


@compiled
def _prefetch_row(rows: Floats, row: int) -> None:
    for column in range(0, rows.shape[1], 16):
        prefetch(rows, row, column)
    prefetch(rows, row, rows.shape[1] - 1)


@compiled
def _swap(one: Floats, other: Floats, at: Indices, to: Indices, start: int, stop: int) -> None:
    for number in range(start, stop):
        if number + AHEAD < stop:
            _prefetch_row(one, at[number + AHEAD])
            _prefetch_row(other, to[number + AHEAD])
        here, there = one[at[number]], other[to[number]]
        for column in range(one.shape[1]):
            here[column], there[column] = there[column], here[column]
