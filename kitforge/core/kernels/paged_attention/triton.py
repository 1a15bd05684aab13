"""`paged_attention` in Triton: each key and value is read once, in its own dtype, without a gathered copy.

The positions of a sequence are split over programs, as in Flash-Decoding (Dao et al., 2023): each program takes the
queries that share one key head over one split, with a running maximum and sum; a second kernel merges the splits. A
sequence of one split needs no second kernel. How a sequence is split follows from its own length alone, so its result
does not depend on its neighbors; the number of programs follows from shapes alone, so a call can be recorded in a CUDA
graph.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.dependent import await_last
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import device_description, launch_grid, quotient_up, row_block

# The shortest sides of a tile of a product on tensor cores.
_LEAST = 16
# Elements of the tiles that a program loads at once, in those of a device's tile: more of two bytes for tensor cores.
_TILES = {2: 2, 4: 0.25, 8: 0.125}
# A split has a device's tile elements over this many positions, or more where a sequence would have too many splits.
_SPANS = 8
_MOST_SPLITS = 64


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    window: int | None,
    scale: float,
    slopes: Tensor | None = None,
) -> Tensor:
    result: Tensor = _attend(query, keys, values, tables, lengths, slopes, block_size, window or 0, scale)
    return result


@triton_op("kitforge::paged_attention")
def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    block_size: int,
    window: int,
    scale: float,
) -> Tensor:
    return attend_pages(query, keys, values, tables, lengths, slopes, block_size, window, scale, {"PDL": False})


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    block_size: int,
    window: int,
    scale: float,
    launch: dict[str, Any],
) -> Tensor:
    """`paged_attention` without its operator; the window may be 0, and the launch is a `dependent_launch`."""
    sequences, heads, dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not output.numel():
        return output
    is_double = query.dtype == torch.float64
    features = max(row_block(dim), 1 if is_double else _LEAST)
    device = device_description(query.device)
    # Larger tiles of keys spill registers.
    block = max(_LEAST, int(device.tile_elements * _TILES[query.element_size()]) // features)
    span = max(block, device.tile_elements // _SPANS)
    positions = tables.shape[1] * block_size
    splits = min(_MOST_SPLITS, quotient_up(min(positions, window) if window else positions, span))
    exact = torch.promote_types(query.dtype, torch.float32)
    rows, several = sequences * heads, splits if splits > 1 else 0
    partial = torch.empty(rows * several, dim, dtype=exact, device=query.device)
    sums = torch.empty(rows * several, 2, dtype=exact, device=query.device)
    shared = {"SPAN": span, "MOST": _MOST_SPLITS, "KEYS": block, **launch}
    launch_grid(
        *(_split_kernel, sequences * kv_heads * splits, block),
        *(query, keys, values, tables, lengths, slopes, output, partial, sums, sequences * kv_heads * splits),
        *(kv_heads, group, dim, splits, window, scale),
        *(*query.stride(), *keys.stride(), *values.stride(), *tables.stride(), lengths.stride(0)),
        num_warps=4,
        num_stages=3,
        is_queued=True,
        GROUP=row_block(group) if is_double else max(row_block(group), _LEAST),
        FEATURES=features,
        PAGE=block_size,
        HAS_SLOPES=slopes is not None,
        IS_DOUBLE=is_double,
        # The interpreter multiplies bfloat16 as integers.
        WIDEN=query.device.type == "cpu" and query.dtype == torch.bfloat16,
        **shared,
    )
    if several:
        launch_grid(
            *(_merge_kernel, rows, features, output, partial, sums, lengths),
            *(rows, heads, dim, splits, window, lengths.stride(0)),
            num_warps=min(max(_MOST_SPLITS * features // 1024, 1), 8),
            is_queued=True,
            # The order of a sum over lanes depends on their number, which must not be that of the longest sequence.
            SPLITS=row_block(_MOST_SPLITS),
            **shared,
        )
    return output


_attend.register_fake(lambda query, *_: query.new_empty(query.shape))


@triton.jit
def _divide(length, window, SPAN: tl.constexpr, MOST: tl.constexpr, KEYS: tl.constexpr):
    """The first position that a sequence attends to, and the positions of one of its splits."""
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    return first, tl.maximum(SPAN, tl.cdiv(length - first, MOST * KEYS) * KEYS)


@triton.jit
def _multiply(left, right, IS_DOUBLE: tl.constexpr):
    """left [m, k] @ right [k, n]; tensor cores have no float64 here."""
    if IS_DOUBLE:
        return tl.sum(left[:, :, None] * right[None, :, :], 1)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _split_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    slopes,
    output,
    partial,
    sums,
    num_tiles,
    kv_heads,
    group,
    dim,
    splits,
    window,
    scale,
    query_sequence,
    query_head,
    query_feature,
    key_slot,
    key_head,
    key_feature,
    value_slot,
    value_head,
    value_feature,
    table_sequence,
    table_block,
    length_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    WIDEN: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_last(PDL)
    members, columns, lanes = tl.arange(0, GROUP), tl.arange(0, FEATURES), tl.arange(0, BLOCK)
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        # The heads of the same pages follow each other.
        kv_head, split = tile % kv_heads, tile // kv_heads % splits
        sequence = (tile // (kv_heads * splits)).to(tl.int64)
        length = tl.load(lengths + sequence * length_stride, mask=tile < num_tiles, other=0).to(tl.int32)
        first, span = _divide(length, window, SPAN, MOST, KEYS)
        begin = first + split * span
        end = tl.minimum(begin + span, length)
        # A tile beyond the last one, or a split beyond those of the sequence, has nothing to do.
        if begin < end:
            heads = kv_head * group + members
            is_head, is_column = members < group, columns < dim
            inside = is_head[:, None] & is_column[None, :]
            offsets = heads[:, None] * query_head + columns[None, :] * query_feature
            q = tl.load(query + sequence * query_sequence + offsets, mask=inside, other=0)
            if WIDEN:
                q = q.to(EXACT)
            if HAS_SLOPES:
                slope = tl.load(slopes + heads, mask=is_head, other=0).to(EXACT)
            key_columns = keys + kv_head * key_head + columns * key_feature
            value_columns = values + kv_head * value_head + columns * value_feature
            highest = tl.full((GROUP,), float("-inf"), EXACT)
            total = tl.zeros((GROUP,), EXACT)
            mixed = tl.zeros((GROUP, FEATURES), EXACT)
            row_of_table = tables + sequence * table_sequence
            pages = tl.load(row_of_table + (begin + lanes) // PAGE * table_block, mask=begin + lanes < end, other=0)
            for start in range(begin, end, BLOCK):
                positions = start + lanes
                seen = positions < end
                slots = pages.to(tl.int64) * PAGE + positions % PAGE
                following = positions + BLOCK
                # Pages are known before their keys are loaded, so that those are not waited for twice.
                pages = tl.load(row_of_table + following // PAGE * table_block, mask=following < end, other=0)
                loaded = seen[:, None] & is_column[None, :]
                k = tl.load(key_columns[None, :] + slots[:, None] * key_slot, mask=loaded, other=0)
                v = tl.load(value_columns[None, :] + slots[:, None] * value_slot, mask=loaded, other=0)
                if WIDEN:
                    k, v = k.to(EXACT), v.to(EXACT)
                scores = _multiply(q, tl.trans(k), IS_DOUBLE) * scale
                if HAS_SLOPES:
                    scores += slope[:, None] * (positions - (length - 1)).to(EXACT)[None, :]
                scores = tl.where(seen[None, :], scores, float("-inf"))
                # Each block holds at least one position.
                top = tl.maximum(highest, tl.max(scores, 1))
                weights = tl.exp(scores - top[:, None])
                scaling = tl.exp(highest - top)
                total = total * scaling + tl.sum(weights, 1)
                mixed = mixed * scaling[:, None] + _multiply(weights.to(v.dtype), v, IS_DOUBLE)
                highest = top
            row = sequence * kv_heads * group + heads
            if length - first <= span:
                result = (mixed / total[:, None]).to(output.dtype.element_ty)
                tl.store(output + row[:, None] * dim + columns[None, :], result, mask=inside)
            else:
                own = row * splits + split
                tl.store(partial + own[:, None] * dim + columns[None, :], mixed, mask=inside)
                tl.store(sums + 2 * own, highest, mask=is_head)
                tl.store(sums + 2 * own + 1, total, mask=is_head)


@triton.jit
def _merge_kernel(
    output,
    partial,
    sums,
    lengths,
    num_rows,
    heads,
    dim,
    splits,
    window,
    length_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_last(PDL)
    columns, lanes = tl.arange(0, BLOCK), tl.arange(0, SPLITS)
    for step in range(steps):
        row = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64)
        length = tl.load(lengths + row // heads * length_stride, mask=row < num_rows, other=0).to(tl.int32)
        first, span = _divide(length, window, SPAN, MOST, KEYS)
        own = tl.cdiv(length - first, span)
        # The result of a sequence of one split is there already.
        if own > 1:
            is_own, index = lanes < own, row * splits + lanes
            inside = is_own[:, None] & (columns < dim)[None, :]
            tops = tl.load(sums + 2 * index, mask=is_own, other=float("-inf"))
            totals = tl.load(sums + 2 * index + 1, mask=is_own, other=0)
            mixed = tl.load(partial + index[:, None] * dim + columns[None, :], mask=inside, other=0)
            factors = tl.exp(tops - tl.max(tops, 0))
            result = tl.sum(mixed * factors[:, None], 0) / tl.sum(totals * factors, 0)
            tl.store(output + row * dim + columns, result.to(output.dtype.element_ty), mask=columns < dim)
