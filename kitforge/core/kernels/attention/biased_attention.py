"""`attention` with a learned bias, by matrix products that save their weights.

torch's fused attention has no gradient for a bias on a CPU, and would repeat the bias for each row. Here the rows of a
batch are computed one after the other, all with the same bias, whose gradient is the sum of theirs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.attention import reference
from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES, compute_dtype


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """See `AttentionKernel`, with a bias and as many heads of keys as of queries."""
    dtype = compute_dtype(query)
    with torch.autocast(query.device.type, enabled=False):
        inputs = (each.to(dtype) for each in (query, key, value))
        mixed: Tensor = _BiasedProducts.apply(*inputs, bias, mask, scale)  # type: ignore[no-untyped-call]
    return mixed


def _dtypes(query: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Of scores, and of the products with values and gradients: that of the queries where this processor has it."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return exact, query.dtype if NATIVE_DTYPES.get(query.dtype, True) else exact


def _again(ctx: Any) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    *inputs, mask, _ = ctx.saved_tensors

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return reference.attention(query, key, value, mask=mask, causal=False, scale=ctx.scale, bias=bias)

    return tuple(inputs), attend


class _BiasedProducts(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 (torch's way of passing arguments)
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        exact, product = _dtypes(query)
        kept = query.new_empty(*query.shape[:3], key.shape[2])
        # Laid out as [batch, length, heads, head_dim], like the output of a linear layer.
        mixed = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        exact_bias, hidden = bias.to(exact), None if mask is None else ~mask.expand(len(query), -1, -1, -1)
        for row in range(len(query)):
            scores = torch.baddbmm(exact_bias, query[row].to(exact), key[row].to(exact).transpose(1, 2), alpha=scale)
            if hidden is not None:
                scores.masked_fill_(hidden[row], float("-inf"))
            kept[row] = torch.softmax(scores, dim=-1)
            mixed[row] = kept[row].to(product) @ value[row].to(product)
        ctx.save_for_backward(query, key, value, bias, mask, kept)
        ctx.scale = scale
        return mixed

    @staticmethod
    @by_hand(_again)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        query, key, value, bias, _, kept = ctx.saved_tensors
        exact, product = _dtypes(query)
        of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
        of_bias = torch.zeros(kept.shape[1:], dtype=exact, device=kept.device)
        for row in range(len(query)):
            of_weights = gradient[row].to(exact) @ value[row].to(exact).transpose(1, 2)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, kept[row].to(exact), -1, exact)
            of_bias += of_scores
            of_scores = of_scores.mul_(ctx.scale).to(product)
            of_query[row] = of_scores @ key[row].to(product)
            of_key[row] = of_scores.transpose(1, 2) @ query[row].to(product)
            of_value[row] = kept[row].to(product).transpose(1, 2) @ gradient[row].to(product)
        return of_query, of_key, of_value, of_bias.to(bias.dtype), None, None
