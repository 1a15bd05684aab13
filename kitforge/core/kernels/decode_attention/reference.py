"""The definition of `decode_attention`: sequence by sequence."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.attention import reference


class DecodeAttentionKernel(Protocol):
    """Softmax attention of one query per sequence: query [sequences, heads, head_dim].

    Keys and values of a sequence are `lengths` int64 [sequences] consecutive slots from `starts` int64 [sequences] on,
    or the last `window` of them, in keys and values [slots, kv_heads, head_dim]. `slopes` [heads] add ALiBi's bias,
    slope * (position - last position). Returns [sequences, heads, head_dim].
    """

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        lengths: Tensor,
        /,
        *,
        window: int | None,
        scale: float,
        slopes: Tensor | None = None,
    ) -> Tensor: ...


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
    attention: Callable[..., Tensor] = reference.attention,
) -> Tensor:
    output = torch.empty_like(query)
    for sequence, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        first = start if window is None else start + max(0, length - window)
        # [1, kv_heads, positions, D]
        seen = [slab[first : start + length].transpose(0, 1).unsqueeze(0).to(query.dtype) for slab in (keys, values)]
        token = query[sequence].unsqueeze(0).unsqueeze(2)
        mixed = attention(token, *seen, mask=None, causal=False, scale=scale, slopes=slopes)
        output[sequence] = mixed[0, :, 0]
    return output
