"""The rows of a compiled step between its products: rounded, normalized, rotated and activated, one at a time.

Only the sums of a row are `compiled_fastmath`: LLVM inlines these loops into several callers, and may fuse products
with sums differently in each, so that a token of a prompt would differ from the same one decoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kitforge.core.kernels.linear.gemm_microkernel import PANEL
from kitforge.core.kernels.numba_runtime import (
    array_at,
    compiled,
    compiled_fastmath,
    exponential,
    narrowed,
    rounded,
    widened,
)

_LARGEST = np.float32(88)
# Twice the coefficients of the tanh GELU.
_LINEAR, _CUBIC = np.float32(2 * 0.7978845608028654), np.float32(2 * 0.7978845608028654 * 0.044715)


@compiled
def write_row(source: Any, target: Any, like: Any) -> None:
    """Copy numbers, rounded to the type of `like`."""
    for k in range(len(source)):
        target[k] = narrowed(source[k], like)


@compiled_fastmath
def _total(row: Any) -> Any:
    total = np.float32(0)
    for k in range(len(row)):
        total += row[k]
    return total


@compiled_fastmath
def _total_of_squares(row: Any, mean: Any) -> Any:
    total = np.float32(0)
    for k in range(len(row)):
        total += (row[k] - mean) * (row[k] - mean)
    return total


@compiled
def normalize_row(row: Any, like: Any, weight: int, bias: int, eps: float) -> None:
    """RMSNorm or, with a bias, LayerNorm in place, by weight and bias at these addresses."""
    count, mean = len(row), np.float32(0)
    factors, shifts = array_at(weight, (count,), like), array_at(bias, (count,), like)
    if bias:
        mean = _total(row) / np.float32(count)
    scale = np.float32(1) / np.sqrt(_total_of_squares(row, mean) / np.float32(count) + np.float32(eps))
    if bias:
        for k in range(count):
            row[k] = rounded((row[k] - mean) * scale * widened(factors[k]) + widened(shifts[k]), like)
    else:
        for k in range(count):
            row[k] = rounded(rounded(row[k] * scale, like) * widened(factors[k]), like)


@compiled
def rotate_row(row: Any, like: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    """Rotate the pairs of a head in place."""
    num_pairs = len(cos)
    if interleaved:
        for pair in range(num_pairs):
            x, y = row[2 * pair], row[2 * pair + 1]
            row[2 * pair] = rounded(x * cos[pair] - y * sin[pair], like)
            row[2 * pair + 1] = rounded(y * cos[pair] + x * sin[pair], like)
    else:
        # Arrays of their own, since an index that is a sum is checked for its sign and not vectorized.
        ones, others = row[:num_pairs], row[num_pairs : 2 * num_pairs]
        for pair in range(num_pairs):
            x, y = ones[pair], others[pair]
            ones[pair] = rounded(x * cos[pair] - y * sin[pair], like)
            others[pair] = rounded(y * cos[pair] + x * sin[pair], like)


@compiled
def _gated(number: Any, power: Any) -> Any:
    """`number / (1 + e**-power)`."""
    power = -power
    return number / (np.float32(1) + exponential(_LARGEST if power > _LARGEST else power))


@compiled
def activate_row(like: Any, up: Any, gate: Any, has_gate: bool, has_gelu_gate: bool) -> None:
    """The activation of `PANEL` outputs, in `up`. They are whole vectors: those and a remainder are not rounded
    alike."""
    if has_gate:
        for k in range(PANEL):
            x = gate[k]
            power = x * (_LINEAR + _CUBIC * x * x) if has_gelu_gate else x
            up[k] = rounded(_gated(x, power), like) * up[k]
    else:
        for k in range(PANEL):
            x = up[k]
            up[k] = _gated(x, x * (_LINEAR + _CUBIC * x * x))
