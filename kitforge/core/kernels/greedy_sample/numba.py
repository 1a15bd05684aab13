"""`greedy_sample` in two passes over each row, which write no probabilities, on the threads of the compiled loops.

Those of torch would go on spinning where the next step computes. A row has the same bits whatever rows are beside it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, compiled, float32_at, int64_at, parallel_for
from kitforge.core.kernels.cpu_engine.vectors import (
    LANES,
    keep_lanes,
    larger,
    largest_of,
    part_at,
    powers_of_e,
    sum_of,
    vector_of,
)

# Logits per thread, at least.
GRAIN = 2**18
# Of a block, whose sum is rounded once.
BLOCK = 1024
_LOWEST, _ZERO = np.float32(-np.inf), np.float32(0)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `GreedySampleKernel`; for fp32 on CPU, without gradients."""
    rows, (num_rows, size) = logits.contiguous(), logits.shape
    chosen, logprobs = torch.empty(num_rows, dtype=torch.long), torch.empty(num_rows)
    arguments = rows.data_ptr(), size, chosen.data_ptr(), logprobs.data_ptr()
    parallel_for(lambda start, stop: _choose_rows(*arguments, start, stop), num_rows, GRAIN // max(size, 1) + 1)
    return chosen, logprobs


@compiled
def _choose_rows(logits: int, size: int, chosen: int, logprobs: int, start: int, stop: int) -> None:
    tokens, values = int64_at(chosen, (stop,)), float32_at(logprobs, (stop,))
    for row in range(start, stop):
        address = logits + 4 * size * row
        largest, first = find_largest(address, size)
        token, numbers = first, float32_at(address, (size,))
        while token < size - 1 and numbers[token] != largest:
            token += 1
        tokens[row], values[row] = token, -np.log(_total(address, size, largest))


@compiled
def find_largest(address: int, size: int) -> Any:
    """The largest number and the beginning of the first block that has it."""
    found, first = _LOWEST, 0
    for begin in range(0, size, BLOCK):
        tops, stop = vector_of(_LOWEST), min(begin + BLOCK, size)
        for k in range(begin, stop, LANES):
            tops = larger(keep_lanes(part_at(address + 4 * k, FLOAT, stop - k), 0, stop - k, _LOWEST), tops)
        largest = largest_of(tops)
        if largest > found:
            found, first = largest, begin
    return found, first


@compiled
def _total(address: int, size: int, largest: Any) -> Any:
    """The sum of the powers of all numbers less the largest, in double precision block by block."""
    total = 0.0
    for begin in range(0, size, BLOCK):
        totals, stop = vector_of(_ZERO), min(begin + BLOCK, size)
        for k in range(begin, stop, LANES):
            powers = powers_of_e(part_at(address + 4 * k, FLOAT, stop - k) - largest)
            totals = totals + keep_lanes(powers, 0, stop - k, _ZERO)
        total += sum_of(totals)
    return total
