"""`paged_attention` by torch's own attention over the gathered pages."""

from torch import Tensor

from kitforge.core.kernels.attention.fused import attention
from kitforge.core.kernels.paged_attention.reference import attended, gather_pages


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
    key, value = (gather_pages(slab, tables, block_size) for slab in (keys, values))
    mask = attended(lengths, key.shape[2], window)
    # The bias of a sequence shorter than its pages differs from the definition by the same number for all its keys.
    return attention(query.unsqueeze(2), key, value, mask=mask, causal=False, scale=scale, slopes=slopes).squeeze(2)
