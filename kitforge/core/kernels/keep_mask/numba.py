"""`keep_mask` on all threads of torch."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for
from kitforge.core.kernels.keep_mask.reference import INCREMENTS, MULTIPLIERS, ROUNDS, threshold

# Counters per thread, at least.
GRAIN = 2**12
_KEY_STEPS = np.array(INCREMENTS, np.uint64)
_FACTORS = np.array(MULTIPLIERS, np.uint64)
_HALF, _WORD = np.uint64(32), np.uint64(0xFFFFFFFF)
# Counters of one chunk, whose words stay in the L1 cache.
NEAR = 256


def keep_mask(key: int, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    first, last = start // 4, -(-(start + count) // 4)
    size = last - first
    kept = torch.empty(len(rows), 4 * size, dtype=torch.bool)
    given = (np.uint64(key), rows.numpy(), first, np.uint64(threshold(rate)), kept.numpy())
    # Threads split the rows, or the elements of every row where rows are few and long.
    if len(rows) > size:
        parallel_for(lambda begin, end: _keep(*given, begin, end, 0, size), len(rows), max(1, GRAIN // max(size, 1)))
    else:
        parallel_for(
            lambda begin, end: _keep(*given, 0, len(rows), begin, end), size, max(1, GRAIN // max(len(rows), 1))
        )
    return kept[:, start - 4 * first :][:, :count].contiguous()


@compiled
def _keep(
    key: np.uint64,
    rows: NDArray[np.int64],
    first: int,
    least: np.uint64,
    kept: NDArray[Any],
    begin_row: int,
    end_row: int,
    begin: int,
    end: int,
) -> None:
    """Chunk by chunk, round by round: LLVM vectorizes the loops over a chunk."""
    one, two = np.empty(NEAR, np.uint64), np.empty(NEAR, np.uint64)
    three, four = np.empty(NEAR, np.uint64), np.empty(NEAR, np.uint64)
    for row in range(begin_row, end_row):
        sample = np.uint64(rows[row])
        for start in range(begin, end, NEAR):
            size = min(NEAR, end - start)
            for index in range(size):
                group = np.uint64(first + start + index)
                one[index], two[index] = group & _WORD, group >> _HALF
                three[index], four[index] = sample & _WORD, sample >> _HALF
            low, high = key & _WORD, key >> _HALF
            for _ in range(ROUNDS):
                for index in range(size):
                    left, right = _FACTORS[0] * one[index], _FACTORS[1] * three[index]
                    one[index] = (right >> _HALF) ^ two[index] ^ low
                    two[index] = right & _WORD
                    three[index] = (left >> _HALF) ^ four[index] ^ high
                    four[index] = left & _WORD
                low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
            for index in range(size):
                target = 4 * (start + index)
                kept[row, target] = one[index] >= least
                kept[row, target + 1] = two[index] >= least
                kept[row, target + 2] = three[index] >= least
                kept[row, target + 3] = four[index] >= least
