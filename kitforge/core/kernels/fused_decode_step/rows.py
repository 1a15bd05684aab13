"""The rows of a compiled step between its products: rounded, normalized, rotated and activated, one at a time.

None is `compiled_fastmath`: LLVM inlines these loops into several callers, and might fuse products with sums
differently in each, so that a token of a prompt would differ from the same one decoded.
"""

from typing import Any

import numpy as np

from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, array_at, compiled, float32_at, rounded
from kitforge.core.kernels.cpu_engine.vectors import (
    LANES,
    fused,
    keep_lanes,
    part_at,
    sum_of,
    times_sigmoid,
    to_precision,
    vector_at,
    vector_of,
    write_part,
)

_ZERO = np.float32(0)
# Twice the coefficients of the tanh GELU.
_LINEAR, _CUBIC = np.float32(2 * 0.7978845608028654), np.float32(2 * 0.7978845608028654 * 0.044715)


@compiled
def add_row(row: int, branch: int, count: int, like: Any) -> None:
    """Add the fp32 numbers of `branch` to those of `row`, rounded to the type of `like`, and write them to both."""
    for k in range(0, count, LANES):
        total = part_at(row + 4 * k, FLOAT, count - k) + part_at(branch + 4 * k, FLOAT, count - k)
        total = to_precision(total, like)
        write_part(total, row + 4 * k, FLOAT, count - k)
        write_part(total, branch + 4 * k, FLOAT, count - k)


@compiled
def update_row(row: int, update: int, count: int, like: Any, bias: int, rescaling: int) -> None:
    """`Update.added` in place, by addresses of fp32 numbers and of a bias of the type of `like`; 0 for none."""
    size = array_at(bias, (1,), like).itemsize
    for k in range(0, count, LANES):
        total = part_at(row + 4 * k, FLOAT, count - k) + part_at(update + 4 * k, FLOAT, count - k)
        if rescaling:
            own = part_at(bias + size * k, like, count - k) if bias else vector_of(_ZERO)
            total = fused(total - own, part_at(rescaling + 4 * k, FLOAT, count - k), own)
        write_part(to_precision(total, like), row + 4 * k, FLOAT, count - k)


@compiled
def write_row(source: int, target: int, like: Any, count: int) -> None:
    """Copy fp32 numbers, rounded to the type of `like`."""
    for k in range(0, count, LANES):
        write_part(
            part_at(source + 4 * k, FLOAT, count - k),
            target + array_at(target, (1,), like).itemsize * k,
            like,
            count - k,
        )


@compiled
def normalize_row(row: int, count: int, types: Any, weight: int, bias: int, eps: float) -> None:
    """RMSNorm or, with a bias, LayerNorm in place, by weight and bias at these addresses, of `types[1]`."""
    like, own = types  # of the row, and of weight and bias
    size, mean, squares = array_at(weight, (1,), own).itemsize, vector_of(_ZERO), vector_of(_ZERO)
    if bias:
        total = vector_of(_ZERO)
        for k in range(0, count, LANES):
            total = total + part_at(row + 4 * k, FLOAT, count - k)
        mean = vector_of(sum_of(total) / np.float32(count))
    for k in range(0, count, LANES):
        centered = keep_lanes(part_at(row + 4 * k, FLOAT, count - k) - mean, 0, count - k, _ZERO)
        squares = fused(centered, centered, squares)
    scale = np.float32(1) / np.sqrt(sum_of(squares) / np.float32(count) + np.float32(eps))
    for k in range(0, count, LANES):
        numbers, factors = part_at(row + 4 * k, FLOAT, count - k), part_at(weight + size * k, own, count - k)
        if bias:
            numbers = fused((numbers - mean) * scale, factors, part_at(bias + size * k, own, count - k))
        else:
            numbers = to_precision(numbers * scale, own) * factors
        write_part(to_precision(numbers, like), row + 4 * k, FLOAT, count - k)


@compiled
def rotate_row(row: int, like: Any, cos: int, sin: int, num_pairs: int, interleaved: bool) -> None:
    """Rotate the pairs of a head in place, by fp32 cosines and sines."""
    if interleaved:
        numbers, cosines, sines = (
            float32_at(row, (2 * num_pairs,)),
            float32_at(cos, (num_pairs,)),
            float32_at(sin, (num_pairs,)),
        )
        for pair in range(num_pairs):
            x, y = numbers[2 * pair], numbers[2 * pair + 1]
            numbers[2 * pair] = rounded(x * cosines[pair] - y * sines[pair], like)
            numbers[2 * pair + 1] = rounded(y * cosines[pair] + x * sines[pair], like)
        return
    for pair in range(0, num_pairs, LANES):
        count, one, other = num_pairs - pair, row + 4 * pair, row + 4 * (num_pairs + pair)
        x, y = part_at(one, FLOAT, count), part_at(other, FLOAT, count)
        c, s = part_at(cos + 4 * pair, FLOAT, count), part_at(sin + 4 * pair, FLOAT, count)
        write_part(to_precision(x * c - y * s, like), one, FLOAT, count)
        write_part(to_precision(y * c + x * s, like), other, FLOAT, count)


@compiled
def activate_row(like: Any, up: int, gate: int, has_gelu_gate: bool, target: int, count: int) -> None:
    """Write the activation of the first `count` of `PANEL` outputs at `up` to `target`; a gate at 0 is none."""
    size = array_at(target, (1,), like).itemsize
    for k in range(0, count, LANES):
        numbers = vector_at(up + 4 * k, FLOAT)
        if gate:
            x = vector_at(gate + 4 * k, FLOAT)
            power = x * fused(x * x, _CUBIC, _LINEAR) if has_gelu_gate else x
            numbers = to_precision(times_sigmoid(x, power), like) * numbers
        else:
            numbers = times_sigmoid(numbers, numbers * fused(numbers * numbers, _CUBIC, _LINEAR))
        write_part(numbers, target + size * k, like, count - k)
