"""`random_sample` in two passes over each row and one over the block that holds the drawn index, on the threads of the
compiled loops. A row has the same bits whatever rows are beside it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, array_at, compiled, float32_at, int64_at, parallel_for
from kitforge.core.kernels.cpu_engine.vectors import (
    LANES,
    above,
    keep_lanes,
    part_at,
    powers_of_e,
    sum_of,
    vector_of,
    write_vector,
)
from kitforge.core.kernels.greedy_sample.numba import BLOCK, GRAIN, find_largest

_ZERO, _DOUBLE = np.float32(0), np.float64(0)
_TINY = np.finfo(np.float32).tiny


def random_sample(logits: Tensor, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `RandomSampleKernel`; for fp32 on CPU, without gradients."""
    rows, uniforms, (num_rows, size) = logits.contiguous(), points.contiguous(), logits.shape
    chosen, logprobs = torch.empty(num_rows, dtype=torch.long), torch.empty(num_rows)
    scale = np.float32(1 / max(temperature, float(_TINY)))
    arguments = rows.data_ptr(), size, scale, uniforms.data_ptr(), chosen.data_ptr(), logprobs.data_ptr()
    parallel_for(lambda start, stop: _draw_rows(*arguments, start, stop), num_rows, GRAIN // max(size, 1) + 1)
    return chosen, logprobs


@compiled
def _draw_rows(
    logits: int, size: int, scale: Any, points: int, chosen: int, logprobs: int, start: int, stop: int
) -> None:
    tokens, values = int64_at(chosen, (stop,)), float32_at(logprobs, (stop,))
    uniforms = array_at(points, (stop,), _DOUBLE)
    totals, powers = np.empty((size + BLOCK - 1) // BLOCK, np.float64), np.empty(BLOCK, np.float32)
    for row in range(start, stop):
        address = logits + 4 * size * row
        largest = find_largest(address, size)[0]
        total = 0.0
        for block in range(len(totals)):
            begin = BLOCK * block
            totals[block] = _total(address + 4 * begin, min(size - begin, BLOCK), largest, scale)
            total += totals[block]
        goal = uniforms[row] * total
        block, before = _find(totals, goal)
        begin, part = BLOCK * block, (goal - before) / totals[block]
        own, exact = powers[: min(size - begin, BLOCK)], 0.0
        _write_powers(address + 4 * begin, len(own), largest, scale, powers)
        # The total of the block was rounded otherwise, which the last token would pay for.
        for power in own:
            exact += power
        token = begin + _find(own, part * exact)[0]
        score = (float32_at(address, (size,))[token] - largest) * scale
        tokens[row], values[row] = token, score - np.log(total)


@compiled
def _find(weights: Any, goal: float) -> Any:
    """The index whose weight takes the running sum above the goal, or else the last one with a weight, and the sum of
    those before it. 0 among NaN."""
    found, before, total = 0, 0.0, 0.0
    for index in range(len(weights)):
        if weights[index] > 0:
            found, before = index, total
            total += weights[index]
            if total > goal:
                break
    return found, before


@compiled
def _powers_at(address: int, count: int, largest: Any, scale: Any) -> Any:
    """The weights of the next logits: the powers of their distances below the largest, 0 on lanes behind them."""
    powers = powers_of_e((part_at(address, FLOAT, count) - largest) * scale)
    # Excluded tokens, and those too unlikely for fp32, have the lowest of all powers.
    return keep_lanes(above(powers, _TINY), 0, count, _ZERO)


@compiled
def _total(address: int, count: int, largest: Any, scale: Any) -> Any:
    totals = vector_of(_ZERO)
    for k in range(0, count, LANES):
        totals = totals + _powers_at(address + 4 * k, count - k, largest, scale)
    return sum_of(totals)


@compiled
def _write_powers(address: int, count: int, largest: Any, scale: Any, powers: Any) -> None:
    for k in range(0, count, LANES):
        write_vector(_powers_at(address + 4 * k, count - k, largest, scale), powers.ctypes.data + 4 * k, FLOAT)
