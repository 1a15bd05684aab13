"""`linear` for a few rows and weights in fp32 or bfloat16: as fast as the weight can be read.

Vendors' products are made for many rows; for the few of a decoding step they read the weight up to three times slower
than memory allows, since they lay it out anew first. Here each row of the weight comes from memory once, and meets four
rows of the input at a time. Sums are taken in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.compiled import FLOAT, HALF, alike, floats, reordered, share, widened

# Multiplications that are worth a thread of their own: waking it takes as long as a million of them, and one thread
# alone reads nearly as fast as memory gives.
GRAIN = 2**23


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `dispatch.Linear`; for contiguous weights in fp32 or bfloat16 on CPU, and without a gradient."""
    num_outputs, num_features = weight.shape
    rows, shift, like = input, bias, FLOAT
    if weight.dtype is not torch.float32:
        rows, like = input.float(), HALF
        shift = None if bias is None else bias.float()
    rows = rows.contiguous()
    output = torch.empty(*input.shape[:-1], num_outputs)
    num_rows = output.numel() // max(num_outputs, 1)
    # Weights come by address: `Tensor.numpy` would forbid their storage to be resized from then on, as sharded ones
    # are when they are gathered and let go.
    arguments = (
        rows.data_ptr(),
        weight.data_ptr(),
        like,
        0 if shift is None else shift.data_ptr(),
        output.data_ptr(),
        num_rows,
        num_outputs,
        num_features,
    )
    grain = GRAIN // max(rows.numel(), 1) + 1
    if num_outputs < 2 * grain:
        _multiply_at(*arguments, 0, num_outputs)
    else:
        share(lambda start, stop: _multiply_at(*arguments, start, stop), num_outputs, grain)
    return output if input.dtype is torch.float32 else output.to(input.dtype)


@reordered
def _multiply(input: Any, weight: Any, output: Any, start: int, stop: int) -> None:
    """output [rows, out] = input [rows, in] @ weight [out, in].T for the outputs start .. stop - 1."""
    zero = input.dtype.type(0)
    num_rows, num_features = input.shape
    whole = num_rows - num_rows % 4
    # Four rows of the weight at a time, each of its own quarter, so that memory is read in four straight lines, which
    # the processor foresees. Where a quarter is short, the last row is multiplied once more.
    quarter = (stop - start + 3) // 4
    for a in range(start, start + quarter):
        b, c, d = min(a + quarter, stop - 1), min(a + 2 * quarter, stop - 1), min(a + 3 * quarter, stop - 1)
        for row in range(0, whole, 4):
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
            for k in range(num_features):
                x0, x1, x2, x3 = input[row, k], input[row + 1, k], input[row + 2, k], input[row + 3, k]
                wa, wb = widened(weight[a, k]), widened(weight[b, k])
                wc, wd = widened(weight[c, k]), widened(weight[d, k])
                a0, a1, a2, a3 = a0 + x0 * wa, a1 + x1 * wa, a2 + x2 * wa, a3 + x3 * wa
                b0, b1, b2, b3 = b0 + x0 * wb, b1 + x1 * wb, b2 + x2 * wb, b3 + x3 * wb
                c0, c1, c2, c3 = c0 + x0 * wc, c1 + x1 * wc, c2 + x2 * wc, c3 + x3 * wc
                d0, d1, d2, d3 = d0 + x0 * wd, d1 + x1 * wd, d2 + x2 * wd, d3 + x3 * wd
            output[row, a], output[row, b], output[row, c], output[row, d] = a0, b0, c0, d0
            output[row + 1, a], output[row + 1, b], output[row + 1, c], output[row + 1, d] = a1, b1, c1, d1
            output[row + 2, a], output[row + 2, b], output[row + 2, c], output[row + 2, d] = a2, b2, c2, d2
            output[row + 3, a], output[row + 3, b], output[row + 3, c], output[row + 3, d] = a3, b3, c3, d3
        for row in range(whole, num_rows):
            a0, b0, c0, d0 = zero, zero, zero, zero
            for k in range(num_features):
                x0 = input[row, k]
                a0, b0 = a0 + x0 * widened(weight[a, k]), b0 + x0 * widened(weight[b, k])
                c0, d0 = c0 + x0 * widened(weight[c, k]), d0 + x0 * widened(weight[d, k])
            output[row, a], output[row, b], output[row, c], output[row, d] = a0, b0, c0, d0


@reordered
def _add(bias: Any, output: Any, start: int, stop: int) -> None:
    for row in range(len(output)):
        for place in range(start, stop):
            output[row, place] += bias[place]


@reordered
def _multiply_at(
    rows: int,
    weight: int,
    like: Any,
    bias: int,
    output: int,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    start: int,
    stop: int,
) -> None:
    """The product of what lies at these addresses, the weight's numbers being like that one; a bias at 0 is none."""
    result = floats(output, (num_rows, num_outputs))
    matrix = alike(weight, (num_outputs, num_features), like)
    _multiply(floats(rows, (num_rows, num_features)), matrix, result, start, stop)
    if bias:
        _add(floats(bias, (num_outputs,)), result, start, stop)
