"""`decode_attention` by a compiled loop where it is at hand, else text by text through torch's own attention."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kitforge.core.kernels.attention.fused import attention
from kitforge.core.kernels.decode_attention import reference
from kitforge.core.kernels.fast_path import is_numba_eligible


def decode_attention(
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
    """See `dispatch.DecodeAttentionKernel`. `compiled` gives the loop to be used where it can be."""
    texts = query, keys, values, starts, lengths
    if compiled is not None and is_numba_eligible(keys) and keys.is_contiguous() and values.is_contiguous():
        return compiled()(*texts, window=window, scale=scale)
    return reference.decode_attention(*texts, window=window, scale=scale, attention=attention)
