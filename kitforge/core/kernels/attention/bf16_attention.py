"""Causal `attention` by matrix products that saves its weights, for moderate lengths in native bfloat16.

Blocks of queries are multiplied with the keys up to the last of the block, so little above the diagonal is computed.
Scores, softmax and their gradients are in fp32 at least. torch's fused kernel recomputes the weights in the backward
pass, which long sequences need; for short ones it takes two to three times as long.
"""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import compute_dtype

# Queries in a block.
BLOCK = 64
# Bytes of attention weights saved for the backward pass.
KEPT_BYTES = 8 * 2**20


def fits_in_memory(query: Tensor) -> bool:
    """Whether queries [batch, heads, length, head_dim] are on CPU, in bfloat16 or under its autocast, and their
    attention weights are few enough to be saved."""
    batch, num_heads, length, _ = query.shape
    num_bytes = batch * num_heads * length * (length + BLOCK) // 2 * torch.bfloat16.itemsize
    return query.is_cpu and compute_dtype(query) is torch.bfloat16 and 0 < num_bytes <= KEPT_BYTES


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """See `AttentionKernel`, without a mask and causal."""
    dtype, group = compute_dtype(query), query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    with torch.autocast("cpu", enabled=False):
        mixed: Tensor = _Products.apply(query.to(dtype), key.to(dtype), value.to(dtype), scale)  # type: ignore[no-untyped-call]
    return mixed


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        queries, keys, values = (each.flatten(0, 1) for each in (query, key, value))
        exact_queries, exact_keys = queries.to(exact), keys.to(exact).transpose(1, 2)
        unseen = torch.full((BLOCK, BLOCK), -torch.inf, dtype=exact).triu(1)
        mixed, kept = _like_rows(value), []
        for first in range(0, query.shape[2], BLOCK):
            stop = min(first + BLOCK, query.shape[2])
            size = stop - first
            scores = queries.new_empty((len(queries), size, stop), dtype=exact)
            torch.baddbmm(
                scores, exact_queries[:, first:stop], exact_keys[:, :, :stop], beta=0, alpha=scale, out=scores
            )
            scores[:, :, first:] += unseen[:size, :size]
            weights = torch.softmax(scores, dim=-1).to(query.dtype)
            mixed[:, :, first:stop] = torch.bmm(weights, values[:, :stop]).view_as(value[:, :, first:stop])
            kept.append(weights)
        ctx.save_for_backward(queries, keys, values, *kept)
        ctx.scale, ctx.shape = scale, query.shape
        return mixed

    @staticmethod
    @by_hand()
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *kept = ctx.saved_tensors
        exact = torch.promote_types(queries.dtype, torch.float32)
        gradients = gradient.flatten(0, 1)
        exact_gradients, exact_values = gradients.to(exact), values.to(exact).transpose(1, 2)
        of_queries, of_keys, of_values = (torch.zeros(keys.shape, dtype=exact) for _ in range(3))
        for weights, first in zip(kept, range(0, gradient.shape[2], BLOCK), strict=True):
            stop = min(first + BLOCK, gradient.shape[2])
            of_weights = torch.bmm(exact_gradients[:, first:stop], exact_values[:, :, :stop])
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights.to(exact), -1, exact)
            of_scores = of_scores.mul_(ctx.scale).to(queries.dtype)
            of_queries[:, first:stop] = torch.bmm(of_scores, keys[:, :stop])
            of_keys[:, :stop] += torch.bmm(of_scores.transpose(1, 2), queries[:, first:stop])
            of_values[:, :stop] += torch.bmm(weights.transpose(1, 2), gradients[:, first:stop])
        of_query, of_key, of_value = (
            _like_rows(gradient).copy_(each.view(ctx.shape)) for each in (of_queries, of_keys, of_values)
        )
        return of_query, of_key, of_value, None


def _like_rows(heads: Tensor) -> Tensor:
    """Memory for [batch, heads, length, head_dim] laid out as [batch, length, heads, head_dim], like the output of a
    linear layer."""
    return torch.empty_like(heads.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
