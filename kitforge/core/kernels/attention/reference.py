"""The definition of `attention`: scores, softmax and mixture written out, with the softmax in fp32 at least."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class AttentionKernel(Protocol):
    """Softmax attention: query [batch, heads, length, head_dim], key and value [batch, kv_heads, keys, head_dim].

    `mask` is boolean, True where a query may look, broadcastable to [batch, heads, length, keys]; without a mask the
    attention is causal (query and key counts equal) or, when `causal` is False, unrestricted.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor: ...


def probabilities(query: Tensor, key: Tensor, *, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Attention weights [batch, heads, length, keys]; key heads are repeated over their group of query heads."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1) * scale
    if mask is None and causal:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    exact = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=exact).to(query.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """See `AttentionKernel`."""
    weights = probabilities(query, key, mask=mask, causal=causal, scale=scale)
    return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
