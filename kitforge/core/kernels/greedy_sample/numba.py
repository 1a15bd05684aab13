"""`greedy_sample` in two passes over each row, which write no probabilities, on the threads of the compiled loops.

Those of torch would go on spinning where the next step computes. A row has the same bits whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.numba_runtime import compiled_fastmath, exponential, float32_at, int64_at, parallel_for

# Logits per thread, at least.
GRAIN = 2**18
# Of a block, whose sum is rounded once; a block is read in lanes, so that it fills vectors.
BLOCK, _LANES = 1024, 64


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `GreedySampleKernel`; for fp32 on CPU, without gradients."""
    rows, (num_rows, size) = logits.contiguous(), logits.shape
    chosen, logprobs = torch.empty(num_rows, dtype=torch.long), torch.empty(num_rows)
    arguments = rows.data_ptr(), size, chosen.data_ptr(), logprobs.data_ptr()
    parallel_for(lambda start, stop: _choose_rows(*arguments, start, stop), num_rows, GRAIN // max(size, 1) + 1)
    return chosen, logprobs


@compiled_fastmath
def _choose_rows(logits: int, size: int, chosen: int, logprobs: int, start: int, stop: int) -> None:
    lanes = np.empty(_LANES, np.float32)
    tokens, values = int64_at(chosen, (stop,)), float32_at(logprobs, (stop,))
    for row in range(start, stop):
        address = logits + 4 * size * row
        largest, first = _largest(address, size, lanes)
        token, numbers = first, float32_at(address, (size,))
        while token < size - 1 and numbers[token] != largest:
            token += 1
        tokens[row], values[row] = token, -np.log(_total(address, size, largest, lanes))


@compiled_fastmath
def _largest(address: int, size: int, lanes: Any) -> Any:
    """The largest number and the beginning of the first block that has it."""
    found, first = np.float32(-np.inf), 0
    for begin in range(0, size, BLOCK):
        largest, count = np.float32(-np.inf), min(BLOCK, size - begin)
        whole = count // _LANES * _LANES
        lanes[:] = largest
        for start in range(begin, begin + whole, _LANES):
            part = float32_at(address + 4 * start, (_LANES,))
            for lane in range(_LANES):
                lanes[lane] = max(lanes[lane], part[lane])
        for lane in range(_LANES):
            largest = max(largest, lanes[lane])
        rest = float32_at(address + 4 * (begin + whole), (count - whole,))
        for k in range(count - whole):
            largest = max(largest, rest[k])
        if largest > found:
            found, first = largest, begin
    return found, first


@compiled_fastmath
def _total(address: int, size: int, largest: Any, lanes: Any) -> Any:
    """The sum of the powers of all numbers less the largest, in double precision block by block."""
    total = 0.0
    for begin in range(0, size, BLOCK):
        count = min(BLOCK, size - begin)
        whole = count // _LANES * _LANES
        lanes[:] = 0
        for start in range(begin, begin + whole, _LANES):
            part = float32_at(address + 4 * start, (_LANES,))
            for lane in range(_LANES):
                lanes[lane] += exponential(part[lane] - largest)
        for lane in range(_LANES):
            total += lanes[lane]
        rest = float32_at(address + 4 * (begin + whole), (count - whole,))
        for k in range(count - whole):
            total += exponential(rest[k] - largest)
    return total
