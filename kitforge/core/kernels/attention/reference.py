"""The definition of `attention`: scores, softmax in fp32 at least, weighted sum of values."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.attention.packed_mask import PackedMask, dense_mask

Mask = Tensor | PackedMask | None


class AttentionKernel(Protocol):
    """Softmax attention: query [batch, heads, length, head_dim], key and value [batch, kv_heads, keys, head_dim].

    `mask` is boolean, True where a query attends to a key, broadcastable to [batch, heads, length, keys]. Without one,
    attention is causal (as many keys as queries) or, with `causal` False, unrestricted. A `PackedMask` stands for a
    mask of packed rows, of as many keys as queries. `slopes` [heads] add ALiBi's bias, slope * (position of the key -
    position of the query), where the last query is at the last key. `bias` [heads, length, keys], or
    [batch, heads, length, keys], is added to the scores.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask,
        causal: bool,
        scale: float,
        slopes: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor: ...


def probabilities(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask,
    causal: bool,
    scale: float,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention weights [batch, heads, length, keys]; each key head serves a group of query heads."""
    mask = dense_mask(mask)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1) * scale
    exact = torch.promote_types(scores.dtype, torch.float32)
    if slopes is not None:
        scores = scores.to(exact) + alibi_bias(slopes.to(exact), *scores.shape[-2:])
    if bias is not None:
        scores = scores.to(exact) + bias.to(exact)
    if mask is None and causal:
        mask = causal_rows(query)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=exact).to(query.dtype)


def causal_rows(query: Tensor) -> Tensor:
    """The causal mask [length, length] of queries [..., length, head_dim]."""
    length = query.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril()


def alibi_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """ALiBi's bias [heads, queries, keys] of slopes [heads], in their dtype; the last query is at the last key."""
    positions = torch.arange(keys, device=slopes.device)
    distance = positions - positions[keys - queries :].unsqueeze(1)
    return slopes.view(-1, 1, 1) * distance


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    causal: bool,
    scale: float,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    weights = probabilities(query, key, mask=mask, causal=causal, scale=scale, slopes=slopes, bias=bias)
    return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
