"""`copy_rows` in one pass with prefetching: each row is read and written once."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.copy_rows.reference import require_rows
from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for, prefetch_row

# Elements per thread, at least.
GRAIN = 2**17
# Prefetch distance in rows: rows are scattered, so memory latency dominates.
AHEAD = 16

Floats = NDArray[Any]
Indices = NDArray[np.int64]
NO_INDICES = np.empty(0, np.int64)


def copy_rows(source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> None:
    require_rows(source, target, at, to)
    rows = (source.numpy(), target.numpy())
    sources = (NO_INDICES if at is None else at.numpy(), at is None)
    targets = (NO_INDICES if to is None else to.numpy(), to is None)
    count, width = len(source if at is None else at), max(source.shape[1], 1)
    parallel_for(lambda start, stop: _copy(*rows, *sources, *targets, start, stop), count, GRAIN // width)


@compiled
def _copy(
    source: Floats,
    target: Floats,
    at: Indices,
    is_from_front: bool,
    to: Indices,
    is_to_front: bool,
    start: int,
    stop: int,
) -> None:
    for number in range(start, stop):
        if number + AHEAD < stop:
            if not is_from_front:
                prefetch_row(source, at[number + AHEAD], source.shape[1])
            if not is_to_front:
                prefetch_row(target, to[number + AHEAD], source.shape[1])
        one = number if is_from_front else at[number]
        other = number if is_to_front else to[number]
        for column in range(source.shape[1]):
            target[other, column] = source[one, column]
