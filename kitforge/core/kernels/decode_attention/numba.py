"""`decode_attention` by the tiles of `linear`, for tokens of a prompt as for those of a decoding step.

Scores are products of queries with a panel of keys, and outputs those of weights with a panel of values, so both sums
run in order: over features, and over positions from the first one on. A position that a token does not see has weight
0, which leaves its sum as it is. So a token has the same bits whatever tokens are processed beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.linear.gemm_microkernel import LANES, PAIRS, PANEL
from kitforge.core.kernels.linear.numba import LINE, aligned, multiply_panel, pack_panel
from kitforge.core.kernels.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled_fastmath,
    exponential,
    float32_at,
    int64_at,
    narrowed,
    prefetch,
    word,
)


class Slabs(NamedTuple):
    """Heads, and addresses: of keys and values [slots, kv_heads, head_dim], of the slots of positions (int64) and of
    ALiBi's slopes (fp32 [heads])."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    keys: int
    values: int
    slots: int
    slopes: int


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
    output = torch.empty(query.shape, dtype=keys.dtype)
    slopes = exact.new_zeros(query.shape[1]) if slopes is None else slopes.float().contiguous()
    heads = query.shape[1], keys.shape[1], keys.shape[2]
    slabs = Slabs(*heads, keys.data_ptr(), values.data_ptr(), 0, slopes.data_ptr())
    like = FLOAT if keys.dtype is torch.float32 else HALF
    tokens = exact.data_ptr(), output.data_ptr(), starts.data_ptr(), lengths.data_ptr(), len(query)
    over: Any = _attend_each
    over(like, slabs, *tokens, window or 0, scale)
    return output.to(query.dtype)


@compiled_fastmath
def _attend_each(
    like: Any,
    slabs: Any,
    query: int,
    output: int,
    starts: int,
    lengths: int,
    num_tokens: int,
    window: int,
    scale: float,
) -> None:
    first, counts = int64_at(starts, (num_tokens,)), int64_at(lengths, (num_tokens,))
    longest = np.max(counts) if num_tokens else 0
    memory = np.empty((attention_scratch(slabs, 1, longest) + LINE) // 4, dtype=np.float32)
    scratch = aligned(memory.ctypes.data)
    width, itemsize = slabs.num_heads * slabs.head_dim, array_at(output, (1,), like).itemsize
    for token in range(num_tokens):
        own = query + 4 * width * token, output + itemsize * width * token
        for kv_head in range(slabs.num_kv_heads):
            attend(like, slabs, own, first[token], counts[token] - 1, 1, kv_head, window, np.float32(scale), scratch)
    # numba frees an array after its last use, and does not know of addresses.
    memory[0] = 0


@compiled_fastmath
def attention_scratch(slabs: Any, num_tokens: int, length: int) -> Any:
    """Bytes that `attend` needs besides for so many tokens of a text of at most `length` tokens."""
    rows, features = num_tokens * (slabs.num_heads // slabs.num_kv_heads), slabs.head_dim + 2 * LANES
    positions = length + 2 * PANEL
    return 4 * (2 * PANEL * (features + PANEL) + rows * (2 * features + 2 * PANEL + positions)) + 16 * LINE


@compiled_fastmath
def attend(
    like: Any,
    slabs: Any,
    tokens: Any,
    start: int,
    position: int,
    num_tokens: int,
    kv_head: int,
    window: int,
    scale: Any,
    scratch: int,
) -> None:
    """The heads that share a key head, of the tokens at `position` and after it of a text whose first slot is `start`.

    A start of -1 - n means that the slots of the text begin at number n of the slabs' slots. `tokens` are the addresses
    of the first token's queries, fp32 [tokens, heads, head_dim], and of its outputs, like the slabs. A window of 0 is
    none. `scratch` is an `aligned` address of `attention_scratch` bytes.
    """
    group, dim = slabs.num_heads // slabs.num_kv_heads, slabs.head_dim
    num_rows, end = num_tokens * group, position + num_tokens
    # Panels begin at multiples of their width, whatever the window.
    base = max(0, position - window + 1) // PANEL * PANEL if window else 0
    num_positions = (end - base + PANEL - 1) // PANEL * PANEL
    per_word = 4 // array_at(slabs.keys, (1,), like).itemsize
    num_words = (dim + per_word * LANES - 1) // (per_word * LANES) * LANES
    panel = scratch + 8 * PANEL
    rows = aligned(panel + 4 * PANEL * max(num_words, PANEL))
    copies = rows + 4 * num_rows * num_words * (1 if PAIRS else per_word)
    sums = aligned(copies + 4 * PANEL * num_words)
    weights = aligned(sums + 4 * PANEL * num_rows)
    _copy_queries(like, slabs, tokens[0], num_tokens, kv_head, rows, num_words * per_word)
    scores, part = float32_at(weights, (num_rows, num_positions)), float32_at(sums, (num_rows, PANEL))
    slopes = float32_at(slabs.slopes, (slabs.num_heads,))
    for first in range(base, end, PANEL):
        _pack_keys(like, slabs, start, first, end - 1, kv_head, scratch, copies, num_words)
        if PAIRS:
            multiply_panel(like, like, rows, 4 * num_words, num_rows, panel, num_words, sums, 0, panel)
        else:
            multiply_panel(FLOAT, like, rows, 4 * num_words * per_word, num_rows, panel, num_words, sums, 0, panel)
        for row in range(num_rows):
            slope, distance = slopes[kv_head * group + row % group], first - position - row // group
            for lane in range(PANEL):
                scores[row, first - base + lane] = part[row, lane] * scale + slope * np.float32(distance + lane)
    for row in range(num_rows):
        own = position + row // group
        _softmax(scores[row], (max(0, own - window + 1) if window else 0) - base, own + 1 - base)
    width, result = slabs.num_heads * dim, tokens[1]
    mixed = array_at(result, (num_tokens, width), like)
    for feature in range(0, dim, PANEL):
        for first in range(base, end, PANEL):
            _pack_values(like, slabs, start, first, end - 1, kv_head, feature, panel)
            own_weights = weights + 4 * (first - base)
            adds = first - base
            count = PANEL // per_word
            multiply_panel(FLOAT, like, own_weights, 4 * num_positions, num_rows, panel, count, sums, adds, panel)
        for row in range(num_rows):
            column = (kv_head * group + row % group) * dim + feature
            for lane in range(min(PANEL, dim - feature)):
                mixed[row // group, column + lane] = narrowed(part[row, lane], like)


@compiled_fastmath
def slot_of(slabs: Any, start: int, position: int) -> Any:
    """The slot of a position of a text; see `attend`."""
    if start >= 0:
        return start + position
    return int64_at(slabs.slots, (position - start,))[position - start - 1]


@compiled_fastmath
def _copy_queries(like: Any, slabs: Any, queries: int, num_tokens: int, kv_head: int, rows: int, width: int) -> None:
    """Copy the queries of a group of heads to rows [tokens * group, width], with zeros behind their features."""
    group, dim = slabs.num_heads // slabs.num_kv_heads, slabs.head_dim
    query = float32_at(queries, (num_tokens, slabs.num_heads, dim))
    for token in range(num_tokens):
        for head in range(group):
            index = (token * group + head) * width
            if PAIRS:
                row = array_at(rows, (index + width,), like)
                row[index:] = narrowed(np.float32(0), like)
                for k in range(dim):
                    row[index + k] = narrowed(query[token, kv_head * group + head, k], like)
            else:
                exact = float32_at(rows, (index + width,))
                exact[index:] = 0
                for k in range(dim):
                    exact[index + k] = query[token, kv_head * group + head, k]


@compiled_fastmath
def _pack_keys(
    like: Any, slabs: Any, start: int, first: int, last: int, kv_head: int, scratch: int, copies: int, num_words: int
) -> None:
    """Transpose the keys of the positions from `first` on to a panel behind the addresses; `last` repeats. The values
    of these positions and the keys of the following ones are prefetched."""
    addresses, dim = int64_at(scratch, (PANEL,)), slabs.head_dim
    keys, values = array_at(slabs.keys, (1, dim), like), array_at(slabs.values, (1, dim), like)
    for lane in range(PANEL):
        own = slot_of(slabs, start, min(first + lane, last)) * slabs.num_kv_heads + kv_head
        ahead = slot_of(slabs, start, min(first + PANEL + lane, last)) * slabs.num_kv_heads + kv_head
        addresses[lane] = slabs.keys + own * dim * keys.itemsize
        for column in range(0, dim, LINE // keys.itemsize):
            prefetch(values, own, column)
            prefetch(keys, ahead, column)
    if dim * keys.itemsize != 4 * num_words:
        width = 4 * num_words // keys.itemsize
        padded = array_at(copies, (PANEL, width), like)
        padded[:] = narrowed(np.float32(0), like)
        for lane in range(PANEL):
            key = array_at(addresses[lane], (dim,), like)
            for k in range(dim):
                padded[lane, k] = key[k]
            addresses[lane] = copies + 4 * num_words * lane
    pack_panel(scratch, 0, num_words, scratch + 8 * PANEL, scratch + 8 * PANEL)


@compiled_fastmath
def _pack_values(
    like: Any, slabs: Any, start: int, first: int, last: int, kv_head: int, feature: int, panel: int
) -> None:
    """Write the features from `feature` on of the values of the positions from `first` on to a panel; `last` repeats.
    A word of two bfloat16 numbers holds adjacent positions."""
    itemsize, width = array_at(slabs.values, (1,), like).itemsize, min(PANEL, slabs.head_dim - feature)
    values = slabs.values + (kv_head * slabs.head_dim + feature) * itemsize
    size = slabs.num_kv_heads * slabs.head_dim * itemsize
    for index in range(0, PANEL, 4 // itemsize):
        words = array_at(panel + PANEL * index * itemsize, (PANEL,), np.uint32(0))
        value = array_at(values + size * slot_of(slabs, start, min(first + index, last)), (width,), like)
        following = array_at(values + size * slot_of(slabs, start, min(first + index + 1, last)), (width,), like)
        if width == PANEL:
            for lane in range(PANEL):
                words[lane] = word(value[lane], following[lane])
        else:
            words[:] = 0
            for lane in range(width):
                words[lane] = word(value[lane], following[lane])


@compiled_fastmath
def _softmax(scores: Any, start: int, stop: int) -> None:
    """The softmax of the scores from `start` to `stop` - 1, in place; zero for the others."""
    seen = scores[start:stop]
    largest, total = np.float32(-np.inf), np.float32(0)
    for index in range(len(seen)):
        largest = max(largest, seen[index])
    for index in range(len(seen)):
        seen[index] = exponential(seen[index] - largest)
        total += seen[index]
    for index in range(len(seen)):
        seen[index] /= total
    scores[:start] = 0
    scores[stop:] = 0
