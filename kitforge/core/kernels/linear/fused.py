"""`linear` for processors that have no bfloat16 or float16 arithmetic of their own.

There torch emulates a half-precision product about three times slower than an fp32 one. Half precision then serves
as a format for storage only: the input is kept in it, the product is taken in fp32 with the fp32 weight, which is
faster and nearer to the truth, and the output is rounded. Everywhere else this is torch's own linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.half import storage_dtype


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `dispatch.Linear`."""
    half = storage_dtype(input)
    if half is None:
        return functional.linear(input, weight, bias)
    result: Tensor = _StoredHalf.apply(input, weight, bias, half)  # type: ignore[no-untyped-call]
    return result


def traceable_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain operations, which a compiler fuses with their neighbours."""
    half = storage_dtype(input)
    if half is None:
        return functional.linear(input, weight, bias)
    with torch.autocast(input.device.type, enabled=False):
        rounded = input.to(half).to(weight.dtype)
        return functional.linear(rounded, weight, bias).to(half)


class _StoredHalf(torch.autograd.Function):
    """Keeps the rounded input, half the size, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, half: torch.dtype) -> Tensor:
        stored = input.to(half)
        ctx.save_for_backward(stored, weight)
        ctx.has_bias = bias is not None
        ctx.input_dtype = input.dtype
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(stored.to(weight.dtype), weight, bias).to(half)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        stored, weight = ctx.saved_tensors
        exact = grad.to(weight.dtype).reshape(-1, grad.shape[-1])
        grad_input = (exact @ weight).view(stored.shape).to(ctx.input_dtype) if ctx.needs_input_grad[0] else None
        rows = stored.reshape(-1, stored.shape[-1])
        grad_weight = exact.t() @ rows.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = exact.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None
