"""The definition of `paged_attention`: gathers the pages of each sequence, then attends to them."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.attention import reference


class PagedAttentionKernel(Protocol):
    """Softmax attention of one query per sequence over a paged KV cache (Kwon et al., "PagedAttention", 2023):
    query [sequences, heads, head_dim], keys and values [slots, kv_heads, head_dim].

    Position p of a sequence is in slot `tables[sequence, p // block_size] * block_size + p % block_size`; tables int64
    [sequences, blocks]. A sequence attends to its first `lengths` [sequences] positions, at least one, or to the last
    `window` of those. `slopes` [heads] add the bias of ALiBi, slope * (position - last position). Returns
    [sequences, heads, head_dim].
    """

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        /,
        *,
        block_size: int,
        window: int | None,
        scale: float,
        slopes: Tensor | None = None,
    ) -> Tensor: ...


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
    key, value = gather_pages(keys, tables, block_size), gather_pages(values, tables, block_size)
    tokens, seen = query.unsqueeze(2), attended(lengths, key.shape[2], window)
    if slopes is None:
        return reference.attention(tokens, key, value, mask=seen, causal=False, scale=scale).squeeze(2)
    exact = torch.promote_types(query.dtype, torch.float32)
    key, value = (each.to(exact).repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for each in (key, value))
    distance = torch.arange(key.shape[2], device=query.device) - (lengths.view(-1, 1, 1, 1) - 1)
    scores = tokens.to(exact) @ key.transpose(-2, -1) * scale + slopes.to(exact).view(1, -1, 1, 1) * distance
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return (weights @ value).squeeze(2).to(query.dtype)


def gather_pages(slab: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """The blocks of each sequence, gathered: [sequences, kv_heads, positions, head_dim]."""
    num_texts, num_blocks = tables.shape
    blocks = slab.view(-1, block_size, *slab.shape[1:])[tables]
    return blocks.view(num_texts, num_blocks * block_size, *slab.shape[1:]).transpose(1, 2)


def attended(lengths: Tensor, num_positions: int, window: int | None) -> Tensor:
    """The mask [sequences, 1, 1, positions] of the last token of each sequence."""
    distance = lengths.view(-1, 1, 1, 1) - 1 - torch.arange(num_positions, device=lengths.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
