"""`linear` for a few rows, in fp32 or bfloat16, at the speed of memory.

Vendors' matrix products are optimized for many rows. For the few of a decoding step they read the weight up to three
times slower than memory allows, since they repack it first. Here each row of the weight is read once and multiplied
with eight rows of the input at a time. Sums are in fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.linear.gemm_microkernel import FEATURES, PAIRS, ROWS, tile
from kitforge.core.kernels.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled_fastmath,
    float32_at,
    parallel_for,
    widened,
)

# Multiplications per thread, at least: waking one takes as long as a million of them, and a single thread nearly
# saturates the memory bandwidth.
GRAIN = 2**23


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `LinearKernel`; for contiguous weights in fp32 or bfloat16 on CPU, without gradients."""
    num_outputs, num_features = weight.shape
    rows = input.contiguous()
    output = torch.empty(*input.shape[:-1], num_outputs)
    # Weights are passed by address: `Tensor.numpy` would make their storage non-resizable, but FSDP resizes it when it
    # gathers and frees parameters.
    arguments = (
        FLOAT if weight.dtype is torch.float32 else HALF,
        rows.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        output.numel() // max(num_outputs, 1),
        num_outputs,
        num_features,
    )
    grain = GRAIN // max(rows.numel(), 1) + 1
    if num_outputs < 2 * grain:
        multiply(*arguments, 0, num_outputs)
    else:
        parallel_for(lambda start, stop: multiply(*arguments, start, stop), num_outputs, grain)
    return output if input.dtype is torch.float32 else output.to(input.dtype)


_eight, _four, _two, _one = (tile(rows) for rows in (8, 4, 2, 1))


@compiled_fastmath
def multiply(
    like: Any,
    rows: int,
    weight: int,
    bias: int,
    output: int,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    start: int,
    stop: int,
) -> None:
    """output [rows, out] = rows [rows, in] @ weight [out, in].T + bias [out] for the outputs start .. stop - 1, by
    addresses. The output is fp32, all others have the element type of `like`; a bias at 0 is none."""
    sizes = num_rows, num_outputs, num_features
    input, result = array_at(rows, (num_rows, num_features), like), float32_at(output, (num_rows, num_outputs))
    if PAIRS:
        _multiply(like, like, rows, weight, output, *sizes, start, stop)
    else:
        exact = np.empty((num_rows, num_features), dtype=np.float32)
        for row in range(num_rows):
            for k in range(num_features):
                exact[row, k] = widened(input[row, k])
        _multiply(FLOAT, like, exact.ctypes.data, weight, output, *sizes, start, stop)
    if num_features % FEATURES:
        _add_remainder(input, array_at(weight, (num_outputs, num_features), like), result, start, stop)
    if bias:
        _add(array_at(bias, (num_outputs,), like), result, start, stop)


@compiled_fastmath
def _multiply(
    one: Any,
    other: Any,
    rows: int,
    weight: int,
    output: int,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    start: int,
    stop: int,
) -> None:
    """The products of the features that fill tiles; `one` is the element type of rows, `other` that of the weight."""
    row_bytes, output_bytes = num_features * array_at(rows, (1,), one).itemsize, 4 * num_outputs
    weight_bytes, tiled_features = (
        num_features * array_at(weight, (1,), other).itemsize,
        num_features - num_features % FEATURES,
    )
    # Three rows of the weight at a time, one of each third, so that the hardware prefetcher sees three sequential
    # streams. Where a third is short, the last row is multiplied again.
    third = (stop - start + 2) // 3
    for first in range(start, start + third):
        second, last = min(first + third, stop - 1), min(first + 2 * third, stop - 1)
        a, b, c = weight + first * weight_bytes, weight + second * weight_bytes, weight + last * weight_bytes
        for row in range(0, num_rows, ROWS):
            x, y, left = rows + row * row_bytes, output + row * output_bytes, min(num_rows - row, ROWS)
            at, bt, ct = y + 4 * first, y + 4 * second, y + 4 * last
            if left > 4:
                _eight(one, other, x, row_bytes, left - 1, a, b, c, tiled_features, at, bt, ct, output_bytes)
            elif left > 2:
                _four(one, other, x, row_bytes, left - 1, a, b, c, tiled_features, at, bt, ct, output_bytes)
            elif left > 1:
                _two(one, other, x, row_bytes, 1, a, b, c, tiled_features, at, bt, ct, output_bytes)
            else:
                _one(one, other, x, row_bytes, 0, a, b, c, tiled_features, at, bt, ct, output_bytes)


@compiled_fastmath
def _add_remainder(rows: Any, weight: Any, output: Any, start: int, stop: int) -> None:
    """Add the products of the features that do not fill a tile."""
    num_features = rows.shape[1]
    for row in range(len(rows)):
        for column in range(start, stop):
            total = output[row, column]
            for k in range(num_features - num_features % FEATURES, num_features):
                total += widened(rows[row, k]) * widened(weight[column, k])
            output[row, column] = total


@compiled_fastmath
def _add(bias: Any, output: Any, start: int, stop: int) -> None:
    for row in range(len(output)):
        for column in range(start, stop):
            output[row, column] += widened(bias[column])
