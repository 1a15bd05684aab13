"""`decode_attention` by the tiles of `linear`, for tokens of a prompt as for those of a decoding step.

Scores are products of queries with a panel of keys, and outputs those of weights with a panel of values, so both sums
run in order: over features, and over positions from the first one on. A position that a token does not see has weight
0, which leaves its sum as it is. So a token has the same bits whatever tokens are processed beside it.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, PANEL
from kitforge.core.kernels.cpu_engine.matrix_microkernel import release
from kitforge.core.kernels.cpu_engine.mix_microkernel import mix
from kitforge.core.kernels.cpu_engine.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled,
    compiled_fastmath,
    float32_at,
    int64_at,
    narrowed,
    prefetch,
)
from kitforge.core.kernels.cpu_engine.vectors import (
    LANES,
    fused,
    keep_lanes,
    lane_numbers,
    larger,
    largest_of,
    part_at,
    powers_of_e,
    sum_of,
    vector_at,
    vector_of,
    write_part,
    write_vector,
)
from kitforge.core.kernels.linear.numba import (
    LINE,
    aligned,
    multiply_panel,
    multiply_rows,
    pack_panel,
    prefers_matrix_unit,
)


class Slabs(NamedTuple):
    """Heads; whether products take the matrix unit; addresses of keys and values [slots, kv_heads, head_dim], of the
    slots of positions (int64) and of slopes of ALiBi (fp32 [heads])."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_tiles: bool
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
    like = FLOAT if keys.dtype is torch.float32 else HALF
    heads = query.shape[1], keys.shape[1], keys.shape[2], like is HALF and prefers_matrix_unit()
    slabs = Slabs(*heads, keys.data_ptr(), values.data_ptr(), 0, slopes.data_ptr())
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
    release(slabs.has_tiles)
    # numba frees an array after its last use, and does not know of addresses.
    memory[0] = 0


@compiled_fastmath
def attention_scratch(slabs: Any, num_tokens: int, length: int) -> Any:
    """Bytes that `attend` needs besides for so many tokens of a text of at most `length` tokens."""
    rows, features = num_tokens * (slabs.num_heads // slabs.num_kv_heads) + PANEL, slabs.head_dim + 2 * LANES
    positions = length + 3 * PANEL
    numbers = 2 * PANEL * (features + PANEL) + rows * (2 * features + 2 * PANEL + positions)
    return 4 * numbers + 8 * positions + 16 * LINE


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
    offsets = weights + 4 * num_rows * num_positions
    _locate(slabs, start, base, end - 1, kv_head, dim * 4 // per_word, offsets, num_positions)
    _copy_queries(like, slabs, tokens[0], num_tokens, kv_head, rows, num_words * per_word)
    slopes = float32_at(slabs.slopes, (slabs.num_heads,))
    for first in range(0, num_positions, PANEL):
        _pack_keys(like, slabs, offsets + 8 * first, scratch, copies, num_words)
        if PAIRS:
            multiply_rows(like, slabs.has_tiles, rows, 4 * num_words, num_rows, panel, num_words, sums, 0, panel)
        else:
            multiply_panel(FLOAT, like, rows, 4 * num_words * per_word, num_rows, panel, num_words, sums, 0, panel)
        for row in range(num_rows):
            slope = slopes[kv_head * group + row % group]
            for lane in range(0, PANEL, LANES):
                distance = lane_numbers() + np.float32(base + first + lane - position - row // group)
                products = vector_at(sums + 4 * (PANEL * row + lane), FLOAT)
                scores = fused(products, scale, distance * slope)
                write_vector(scores, weights + 4 * (num_positions * row + first + lane), FLOAT)
    for row in range(num_rows):
        own = position + row // group
        begin = (max(0, own - window + 1) if window else 0) - base
        _softmax(weights + 4 * num_positions * row, num_positions, begin, own + 1 - base)
    for feature in range(0, dim, PANEL):
        columns, width = slabs.values + 4 // per_word * feature, min(PANEL, dim - feature)
        mix(like, weights, 4 * num_positions, num_rows, offsets, columns, end - base, width, sums)
        for row in range(num_rows):
            head = row // group * slabs.num_heads + kv_head * group + row % group
            for lane in range(0, width, LANES):
                mixed = vector_at(sums + 4 * (PANEL * row + lane), FLOAT)
                write_part(mixed, tokens[1] + 4 // per_word * (head * dim + feature + lane), like, width - lane)


@compiled_fastmath
def slot_of(slabs: Any, start: int, position: int) -> Any:
    """The slot of a position of a text; see `attend`."""
    if start >= 0:
        return start + position
    return int64_at(slabs.slots, (position - start,))[position - start - 1]


@compiled_fastmath
def _locate(slabs: Any, start: int, first: int, last: int, kv_head: int, size: int, offsets: int, count: int) -> None:
    """Write where in the slabs the rows of `size` bytes of `count` positions from `first` on begin; `last` repeats.
    Behind them follow the first `PANEL` rows of the next head, which are prefetched."""
    table, step = int64_at(offsets, (count + PANEL,)), slabs.num_kv_heads * size
    if start >= 0:
        for index in range(count):
            table[index] = (start + min(first + index, last)) * step + kv_head * size
    else:
        slots = int64_at(slabs.slots - 8 * (start + 1), (last + 1,))
        for index in range(count):
            table[index] = slots[min(first + index, last)] * step + kv_head * size
    for index in range(PANEL):
        table[count + index] = table[index] + size


@compiled_fastmath
def _copy_queries(like: Any, slabs: Any, queries: int, num_tokens: int, kv_head: int, rows: int, width: int) -> None:
    """Copy the queries of a group of heads to rows [tokens * group, width], with zeros behind their features."""
    group, dim = slabs.num_heads // slabs.num_kv_heads, slabs.head_dim
    size = array_at(rows, (1,), like).itemsize
    for index in range(num_tokens * group):
        head = index // group * slabs.num_heads + kv_head * group + index % group
        query = queries + 4 * dim * head
        for k in range(0, width, LANES):
            numbers = part_at(query + 4 * k, FLOAT, dim - k)
            if PAIRS:
                write_part(numbers, rows + size * (width * index + k), like, width - k)
            else:
                write_vector(numbers, rows + 4 * (width * index + k), FLOAT)


@compiled_fastmath
def _pack_keys(like: Any, slabs: Any, offsets: int, scratch: int, copies: int, num_words: int) -> None:
    """Transpose the keys of the positions of a panel to a panel behind their addresses. The values of these positions
    and the keys of the following panel are prefetched."""
    addresses, table, dim = int64_at(scratch, (PANEL,)), int64_at(offsets, (2 * PANEL,)), slabs.head_dim
    itemsize = array_at(slabs.keys, (1,), like).itemsize
    for lane in range(PANEL):
        addresses[lane] = slabs.keys + table[lane]
        value = array_at(slabs.values + table[lane], (1, dim), like)
        following = array_at(slabs.keys + table[PANEL + lane], (1, dim), like)
        for column in range(0, dim, LINE // itemsize):
            prefetch(value, 0, column)
            prefetch(following, 0, column)
    if dim * itemsize != 4 * num_words:
        for lane in range(PANEL):
            padded = array_at(copies + 4 * num_words * lane, (4 * num_words // itemsize,), like)
            padded[:] = narrowed(np.float32(0), like)
            padded[:dim] = array_at(addresses[lane], (dim,), like)
            addresses[lane] = copies + 4 * num_words * lane
    pack_panel(scratch, 0, num_words, scratch + 8 * PANEL, scratch + 8 * PANEL)


_UNSEEN, _ZERO = np.float32(-np.inf), np.float32(0)


@compiled
def _softmax(scores: int, count: int, start: int, stop: int) -> None:
    """The softmax of the scores from `start` to `stop` - 1 of `count`, which fill panels, in place; zero for the
    others."""
    tops, totals = vector_of(_UNSEEN), vector_of(_ZERO)
    for first in range(0, count, LANES):
        tops = larger(keep_lanes(vector_at(scores + 4 * first, FLOAT), start - first, stop - first, _UNSEEN), tops)
    largest = largest_of(tops)
    for first in range(0, count, LANES):
        powers = powers_of_e(vector_at(scores + 4 * first, FLOAT) - largest)
        powers = keep_lanes(powers, start - first, stop - first, _ZERO)
        write_vector(powers, scores + 4 * first, FLOAT)
        totals = totals + powers
    scale = np.float32(1) / sum_of(totals)
    for first in range(0, count, LANES):
        write_vector(vector_at(scores + 4 * first, FLOAT) * scale, scores + 4 * first, FLOAT)
