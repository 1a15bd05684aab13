"""`rotary` that saves only the angles: the gradient of a rotation is the inverse rotation."""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.rotary import reference


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return _rotate(input, cos, sin, interleaved)
    result: Tensor = _Rotary.apply(input, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return result


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(input, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotary(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotate(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation, written into one output without intermediates, except where it is rounded to half precision."""
    if interleaved or torch.compiler.is_compiling():  # a compiler fuses the reference, and refuses views as `out`
        return reference.rotary(input, cos, sin, interleaved)
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    output = torch.empty_like(input)
    sizes = [pairs, pairs, input.shape[-1] - 2 * pairs]
    (first, second, unrotated), (turned_first, turned_second, kept) = (
        torch.split(input, sizes, -1),
        torch.split(output, sizes, -1),
    )
    if input.dtype == cos.dtype:
        torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    else:
        turned_first.copy_((first * cos).addcmul_(second, sin, value=-1))
        turned_second.copy_((second * cos).addcmul_(first, sin))
    if sizes[2]:
        kept.copy_(unrotated)
    return output
