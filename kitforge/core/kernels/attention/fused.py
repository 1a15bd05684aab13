"""`attention` by torch's scaled dot product attention, in fp32 where the processor has no half precision."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.half import storage_dtype


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """See `dispatch.Attention`."""
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
