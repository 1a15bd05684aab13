"""`attention` by torch's scaled dot product attention, in fp32 where the processor has no half precision; where it has,
short texts go by plain products (`bf16_attention`)."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.attention import bf16_attention
from kitforge.core.kernels.mixed_precision import storage_dtype


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """See `AttentionKernel`."""
    half = storage_dtype(query)
    if half is None and mask is None and causal and bf16_attention.fits_in_memory(query):
        return bf16_attention.attention(query, key, value, scale)
    with nullcontext() if half is None else _stored(half):
        return traceable_attention(query, key, value, mask=mask, causal=causal, scale=scale)


def traceable_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """The same without a say in how tensors are kept for the backward pass, which is the compiler's."""
    half = storage_dtype(query)
    causal = causal and mask is None
    grouped = query.shape[1] != key.shape[1]
    if half is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    with torch.autocast(query.device.type, enabled=False):
        return functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        ).to(half)


def _stored(half: torch.dtype) -> torch.autograd.graph.saved_tensors_hooks:
    """Keeps [batch, heads, length, features] in `half` for the backward pass, which for queries, keys and values loses
    nothing; the logarithms of the softmax's sums, [batch, heads, length], stay as they are."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.to(half) if saved.dim() == 4 else saved,
        lambda packed: packed.float(),
    )
