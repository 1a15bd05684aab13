"""`attention` by torch's scaled dot product attention, in fp32 on processors without half precision; short sequences in
native bfloat16 by `bf16_attention`."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.attention import bf16_attention, biased_attention
from kitforge.core.kernels.attention.alibi import FEATURES, with_alibi
from kitforge.core.kernels.attention.packed_mask import PackedMask, dense_mask, packed_attention, takes_packed
from kitforge.core.kernels.attention.reference import Mask, alibi_bias, causal_rows
from kitforge.core.kernels.autograd.mixed_precision import compute_dtype, storage_dtype
from kitforge.core.kernels.autograd.recomputation import Intercept, is_recomputed, kept_operations


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
    if bias is not None:
        terms = _bias_and_mask(query, bias, mask, causal, slopes)
        if query.is_cpu and bias.dim() == 3:
            return biased_attention.attention(query, *_ungrouped(query, key, value), *terms, scale)
        return _under_bias(query, key, value, *terms, scale)
    if slopes is not None:
        inputs = with_alibi(query, key, value, slopes, scale)
        return attention(*inputs, mask=mask, causal=causal, scale=scale)[..., FEATURES:]
    half = storage_dtype(query)
    if half is None and mask is None and causal and bf16_attention.fits_in_memory(query):
        return bf16_attention.attention(query, key, value, scale)
    # Of a recomputed block nothing is saved, which other hooks would undo.
    around = nullcontext() if half is None else _rounded(half) if is_recomputed() else _stored(half)
    with around:
        return traceable_attention(query, key, value, mask=mask, causal=causal, scale=scale)


def traceable_attention(
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
    """The same without control over the tensors saved for the backward pass, which is up to the compiler."""
    if bias is not None:
        return _under_bias(query, key, value, *_bias_and_mask(query, bias, mask, causal, slopes), scale)
    if slopes is not None:
        inputs = with_alibi(query, key, value, slopes, scale)
        return traceable_attention(*inputs, mask=mask, causal=causal, scale=scale)[..., FEATURES:]
    if isinstance(mask, PackedMask):
        if takes_packed(query, query.shape[-1]):
            return packed_attention(query, key, value, mask, scale)
        mask = mask.dense
    half = storage_dtype(query)
    causal = causal and mask is None
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None and query.is_cuda:
        # Under a mask torch has no fused attention for grouped queries: it would write all scores out.
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        grouped = False
    attend = functools.partial(
        functional.scaled_dot_product_attention, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if half is None:
        return kept_operations(attend, query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        return kept_operations(attend, query.float(), key.float(), value.float()).to(half)


def _bias_and_mask(
    query: Tensor, bias: Tensor, mask: Mask, causal: bool, slopes: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The bias [heads, length, keys], or of each row, with that of ALiBi; the mask [batch or 1, 1, length, keys]."""
    if slopes is not None:
        bias = bias + alibi_bias(slopes.to(bias), *bias.shape[-2:])
    seen = causal_rows(query) if mask is None and causal else dense_mask(mask)
    return bias, None if seen is None else seen.view(-1, 1, *seen.shape[-2:])


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return key, value


def _under_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    dtype = compute_dtype(query)
    added = bias if bias.dim() == 4 else bias.unsqueeze(0)
    added = added if seen is None else added.masked_fill(~seen, float("-inf"))
    key, value = _ungrouped(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        attend = functools.partial(functional.scaled_dot_product_attention, attn_mask=added.to(dtype), scale=scale)
        return kept_operations(attend, query.to(dtype), key.to(dtype), value.to(dtype))


def _rounded(half: torch.dtype) -> Intercept:
    """Rounds the output of fused attention, which `_stored` would save rounded and its caller rounds as well."""

    def run(name: str, compute: Callable[[], Any]) -> Any:
        result = compute()
        if name.startswith("aten::_scaled_dot_product"):
            result[0].copy_(result[0].to(half))
        return result

    return Intercept(run)


def _stored(half: torch.dtype) -> torch.autograd.graph.saved_tensors_hooks:
    """Saves queries, keys, values and output [batch, heads, length, features] in `half` for the backward pass, all but
    the output without loss; the softmax's logsumexp [batch, heads, length] keeps its dtype."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.to(half) if saved.dim() == 4 else saved, lambda packed: packed.float()
    )
