"""`paged_attention` in Triton: each key and value is read once, in its own dtype, without a gathered copy.

The positions of a sequence are split over programs, as in Flash-Decoding (Dao et al., 2023): each program takes the
queries that share one key head over one split, with a running maximum and sum; a second kernel merges the splits. The
number of splits follows from shapes alone, so a call can be recorded in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_ops import triton_op
from kitforge.core.kernels.triton_runtime import device_description, launch_grid, row_block

# The shortest sides of a tile of a product on tensor cores.
_LEAST = 16


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
    """See `PagedAttentionKernel`."""
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
    sequences, heads, dim = query.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not output.numel():
        return output
    is_double = query.dtype == torch.float64
    features = max(row_block(dim), 1 if is_double else _LEAST)
    device = device_description(query.device)
    # Larger tiles of keys spill registers.
    block = max(_LEAST, device.tile_elements // query.element_size() // features)
    num_blocks = triton.cdiv(tables.shape[1] * block_size, block)
    splits = max(1, min(num_blocks, triton.cdiv(device.num_programs, sequences * kv_heads)))
    span = triton.cdiv(num_blocks, splits) * block
    exact = torch.promote_types(query.dtype, torch.float32)
    partial = torch.empty(sequences * kv_heads * splits, group, dim, dtype=exact, device=query.device)
    sums = torch.empty(2, sequences * kv_heads * splits, group, dtype=exact, device=query.device)
    launch_grid(
        *(_split_kernel, sequences * kv_heads * splits, block),
        *(query, keys, values, tables, lengths, slopes, partial, sums, sequences * kv_heads * splits),
        *(kv_heads, group, dim, splits, span, block_size, window, scale),
        *(*query.stride(), *keys.stride(), *values.stride(), *tables.stride(), lengths.stride(0)),
        num_warps=4,
        GROUP=row_block(group) if is_double else max(row_block(group), _LEAST),
        FEATURES=features,
        HAS_SLOPES=slopes is not None,
        IS_DOUBLE=is_double,
        # The interpreter multiplies bfloat16 as integers.
        WIDEN=query.device.type == "cpu" and query.dtype == torch.bfloat16,
    )
    rows = sequences * heads
    launch_grid(_merge_kernel, rows, features, output, partial, sums, rows, group, dim, splits, partial.shape[0])
    return output


_attend.register_fake(lambda query, *_: query.new_empty(query.shape))


@triton.jit
def _split_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    slopes,
    partial,
    sums,
    num_tiles,
    kv_heads,
    group,
    dim,
    splits,
    span,
    block_size,
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
    HAS_SLOPES: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    members, columns, lanes = tl.arange(0, GROUP), tl.arange(0, FEATURES), tl.arange(0, BLOCK)
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        split, kv_head, sequence = tile % splits, (tile // splits) % kv_heads, tile // (splits * kv_heads)
        length = tl.load(lengths + sequence * length_stride, mask=tile < num_tiles, other=0)
        heads = kv_head * group + members
        # A tile beyond the last one has no heads, and a sequence of no positions.
        is_head = members < tl.where(tile < num_tiles, group, 0)
        inside = is_head[:, None] & (columns < dim)[None, :]
        offsets = heads[:, None] * query_head + columns[None, :] * query_feature
        q = tl.load(query + sequence * query_sequence + offsets, mask=inside, other=0)
        if WIDEN:
            q = q.to(EXACT)
        if HAS_SLOPES:
            slope = tl.load(slopes + heads, mask=is_head, other=0).to(EXACT)
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        end = tl.minimum((split + 1) * span, length)
        highest = tl.full((GROUP,), float("-inf"), EXACT)
        total = tl.zeros((GROUP,), EXACT)
        mixed = tl.zeros((GROUP, FEATURES), EXACT)
        # Each block holds at least one position of the window.
        for start in range(tl.maximum(split * span, first // BLOCK * BLOCK), end, BLOCK):
            positions = start + lanes
            seen = (positions >= first) & (positions < end)
            pages = tl.load(
                tables + sequence * table_sequence + positions // block_size * table_block, mask=seen, other=0
            )
            slots = pages.to(tl.int64) * block_size + positions % block_size
            loaded = seen[:, None] & (columns < dim)[None, :]
            k = tl.load(
                keys + slots[:, None] * key_slot + kv_head * key_head + columns[None, :] * key_feature,
                mask=loaded,
                other=0,
            )
            v = tl.load(
                values + slots[:, None] * value_slot + kv_head * value_head + columns[None, :] * value_feature,
                mask=loaded,
                other=0,
            )
            if WIDEN:
                k, v = k.to(EXACT), v.to(EXACT)
            if IS_DOUBLE:
                scores = tl.sum(q[:, None, :] * k[None, :, :], 2) * scale
            else:
                scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_SLOPES:
                scores += slope[:, None] * (positions - (length - 1)).to(EXACT)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            top = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp(scores - top[:, None])
            scaling = tl.exp(highest - top)
            total = total * scaling + tl.sum(weights, 1)
            if IS_DOUBLE:
                mixed = mixed * scaling[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
            else:
                product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                mixed = mixed * scaling[:, None] + product
            highest = top
        row = tile * group + members
        tl.store(partial + row[:, None] * dim + columns[None, :], mixed, mask=inside)
        tl.store(sums + row, highest, mask=is_head)
        tl.store(sums + num_tiles * group + row, total, mask=is_head)


@triton.jit
def _merge_kernel(
    output,
    partial,
    sums,
    num_rows,
    group,
    dim,
    splits,
    num_tiles,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        is_row = row < num_rows
        inside = columns < tl.where(is_row, dim, 0)
        highest = tl.full((), float("-inf"), EXACT)
        total = tl.zeros((), EXACT)
        mixed = tl.zeros((BLOCK,), EXACT)
        for split in range(splits):
            index = (row // group * splits + split) * group + row % group
            top = tl.load(sums + index, mask=is_row, other=0).to(EXACT)
            own = tl.load(sums + num_tiles * group + index, mask=is_row, other=1).to(EXACT)
            x = tl.load(partial + index * dim + columns, mask=inside, other=0).to(EXACT)
            # A split beyond the sequence's length has a sum of 0 and a maximum of -inf.
            best = tl.maximum(highest, top)
            anchor = tl.where(best == float("-inf"), 0.0, best)
            before, after = tl.exp(highest - anchor), tl.exp(top - anchor)
            total = total * before + own * after
            mixed = mixed * before + x * after
            highest = best
        tl.store(output + row * dim + columns, (mixed / total).to(output.dtype.element_ty), mask=inside)
