"""`token_attention` by a compiled loop where it is at hand, else text by text through torch's own attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kitforge.core.kernels.attention.fused import attention
from kitforge.core.kernels.plain import is_plain
from kitforge.core.kernels.token_attention import reference


def token_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    scale: float,
    compiled: Callable[[], Callable[..., Tensor]] | None = None,
) -> Tensor:
    """See `dispatch.TokenAttention`. `compiled` gives the loop to be used where it can be."""
    texts = query, keys, values, starts, lengths
    if compiled is not None and is_plain(keys) and keys.is_contiguous() and values.is_contiguous():
        return compiled()(*texts, window=window, scale=scale)
    return reference.token_attention(*texts, window=window, scale=scale, attention=attention)
