"""`rms_norm` that saves the input and one scale per row for the backward pass, not the intermediate tensors.

With r = 1 / sqrt(mean(x²) + eps) and g = grad * weight, the input's gradient is r * (g - x * r² * mean(g * x)).
"""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.rms_norm import reference


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Without gradients, the overhead of autograd.Function would exceed the norm of a token.
    if not torch.is_grad_enabled():
        return _normalized(input, weight, eps)[0]
    result: Tensor = _RMSNorm.apply(input, weight, eps)  # type: ignore[no-untyped-call]
    return result


def _normalized(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and the scale of each row."""
    exact = input.to(torch.promote_types(input.dtype, torch.float32))
    norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scale: Tensor = norm.square_().div_(input.shape[-1]).add_(eps).rsqrt_()
    return (exact * scale).to(input.dtype) * weight, scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, scale = _normalized(input, weight, eps)
        ctx.save_for_backward(input, weight, scale)
        ctx.eps = eps
        return output

    @staticmethod
    @by_hand(lambda ctx: (ctx.saved_tensors[:2], lambda one, weight: reference.rms_norm(one, weight, ctx.eps)))
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, scale = ctx.saved_tensors
        normal = input * scale
        weighted = grad * weight
        grad_weight = (
            (grad * normal).reshape(-1, grad.shape[-1]).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        projection = torch.linalg.vecdot(weighted.to(normal.dtype), normal).div_(input.shape[-1]).unsqueeze_(-1)
        grad_input = normal.mul_(projection).neg_().add_(weighted).mul_(scale)
        return grad_input.to(input.dtype), grad_weight, None
