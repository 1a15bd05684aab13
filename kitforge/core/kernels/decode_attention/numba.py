"""`decode_attention` in one pass over keys and values, in memory order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled_fastmath,
    exponential,
    float32_at,
    int64_at,
    widened,
)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    """See `DecodeAttentionKernel`; for keys and values in fp32 or bfloat16 on CPU, without gradients."""
    exact = query.float().contiguous()
    output = torch.empty_like(exact)
    slopes = exact.new_zeros(query.shape[1]) if slopes is None else slopes.float().contiguous()
    over: Any = _attend_at
    over(
        exact.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        FLOAT if keys.dtype is torch.float32 else HALF,
        starts.data_ptr(),
        lengths.data_ptr(),
        slopes.data_ptr(),
        output.data_ptr(),
        *query.shape,
        *keys.shape[:2],
        window or 0,
        scale,
    )
    return output.to(query.dtype)


@compiled_fastmath
def attend(
    query: Any, keys: Any, values: Any, starts: Any, lengths: Any, slopes: Any, output: Any, window: int, scale: Any
) -> None:
    """Fill output [sequences, heads, D]; see `DecodeAttentionKernel`. A window of 0 is none; slopes of 0 are none."""
    num_heads = query.shape[1]
    for text in range(len(starts)):
        count = min(lengths[text], window) if window else lengths[text]
        first = starts[text] + lengths[text] - count
        # Positions are processed in fours; those beyond the last have weight 0.
        weights = np.empty((num_heads, (count + 3) // 4 * 4), dtype=np.float32)
        largest = np.full(num_heads, -np.inf, dtype=np.float32)
        _score(query[text], keys[first : first + count], weights, slopes, largest, scale)
        for head in range(num_heads):
            _softmax(weights[head], largest[head], count)
        _weighted_sum(weights, values[first : first + count], output[text])


@compiled_fastmath
def _score(query: Any, keys: Any, scores: Any, slopes: Any, largest: Any, scale: Any) -> None:
    zero = np.float32(0)
    last, num_kv_heads, head_dim = len(keys) - 1, keys.shape[1], keys.shape[2]
    group = len(query) // num_kv_heads
    for position in range(0, len(keys), 4):
        # The last position is repeated to fill four.
        b, c, d = min(position + 1, last), min(position + 2, last), min(position + 3, last)
        for head in range(len(query)):
            own = head // group
            s0, s1, s2, s3 = zero, zero, zero, zero
            for k in range(head_dim):
                x = query[head, k]
                s0, s1 = s0 + x * widened(keys[position, own, k]), s1 + x * widened(keys[b, own, k])
                s2, s3 = s2 + x * widened(keys[c, own, k]), s3 + x * widened(keys[d, own, k])
            slope = slopes[head]
            s0, s1 = s0 * scale + slope * np.float32(position - last), s1 * scale + slope * np.float32(b - last)
            s2, s3 = s2 * scale + slope * np.float32(c - last), s3 * scale + slope * np.float32(d - last)
            scores[head, position], scores[head, position + 1] = s0, s1
            scores[head, position + 2], scores[head, position + 3] = s2, s3
            largest[head] = max(largest[head], max(max(s0, s1), max(s2, s3)))


@compiled_fastmath
def _softmax(scores: Any, largest: Any, count: int) -> None:
    """The softmax of the first `count` scores, in place; zero for the others."""
    total = np.float32(0)
    for position in range(count):
        scores[position] = exponential(scores[position] - largest)
        total += scores[position]
    for position in range(count):
        scores[position] /= total
    scores[count:] = 0


@compiled_fastmath
def _weighted_sum(weights: Any, values: Any, output: Any) -> None:
    last, num_kv_heads, head_dim = len(values) - 1, values.shape[1], values.shape[2]
    group = len(output) // num_kv_heads
    output[:] = 0
    for position in range(0, len(values), 4):
        b, c, d = min(position + 1, last), min(position + 2, last), min(position + 3, last)
        for head in range(len(output)):
            own = head // group
            w0, w1 = weights[head, position], weights[head, position + 1]
            w2, w3 = weights[head, position + 2], weights[head, position + 3]
            for k in range(head_dim):
                early = w0 * widened(values[position, own, k]) + w1 * widened(values[b, own, k])
                output[head, k] += early + w2 * widened(values[c, own, k]) + w3 * widened(values[d, own, k])


@compiled_fastmath
def _attend_at(
    query: int,
    keys: int,
    values: int,
    like: Any,
    starts: int,
    lengths: int,
    slopes: int,
    output: int,
    num_texts: int,
    num_heads: int,
    head_dim: int,
    num_slots: int,
    num_kv_heads: int,
    window: int,
    scale: float,
) -> None:
    """`attend` over arrays at these addresses; keys and values have the element type of `like`."""
    shape, slab = (num_texts, num_heads, head_dim), (num_slots, num_kv_heads, head_dim)
    attend(
        float32_at(query, shape),
        array_at(keys, slab, like),
        array_at(values, slab, like),
        int64_at(starts, (num_texts,)),
        int64_at(lengths, (num_texts,)),
        float32_at(slopes, (num_heads,)),
        float32_at(output, shape),
        window,
        np.float32(scale),
    )
