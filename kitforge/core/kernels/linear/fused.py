"""`linear` for processors without native bfloat16 or float16 products; torch's own linear on all others.

Without them torch emulates a half-precision product about three times slower than an fp32 one. Half precision is then
a storage format only: the input is saved in it, the product is computed in fp32 with the fp32 weight, which is faster
and more accurate, and the output is rounded.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import match_dtype, storage_dtype
from kitforge.core.kernels.autograd.recomputation import kept, kept_operations

# Rows copied to fp32 at once: enough for full speed of the products, few enough for the CPU caches.
ROWS = 512


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    half = storage_dtype(input)
    if half is None:
        return kept_operations(functional.linear, input, *match_dtype(input, weight, bias))
    result: Tensor = _StoredHalf.apply(input, weight, bias, half)  # type: ignore[no-untyped-call]
    return result


def traceable_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain operations, which torch.compile fuses."""
    half = storage_dtype(input)
    if half is None:
        return functional.linear(input, *match_dtype(input, weight, bias))
    with torch.autocast(input.device.type, enabled=False):
        rounded = input.to(half).to(weight.dtype)
        return functional.linear(rounded, weight, bias).to(half)


class _StoredHalf(torch.autograd.Function):
    """Saves the input in half precision for the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, half: torch.dtype) -> Tensor:
        stored = input.to(half)
        ctx.save_for_backward(stored, weight)
        ctx.has_bias = bias is not None
        ctx.input_dtype = input.dtype
        return kept(_products, stored, weight, bias)

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        stored, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        matrix = _exact(weight)
        grad_input = torch.empty(stored.shape, dtype=ctx.input_dtype, device=grad.device) if wants_input else None
        grad_weight = torch.zeros_like(matrix) if wants_weight else None
        grad_bias = matrix.new_zeros(len(matrix)) if ctx.has_bias and wants_bias else None
        targets = _parts(stored if grad_input is None else grad_input)
        for rows, part, target in zip(_parts(stored), _parts(grad), targets, strict=True):
            exact = _exact(part)
            if grad_input is not None:
                target.copy_(exact @ matrix)
            if grad_weight is not None:
                grad_weight.addmm_(exact.t(), _exact(rows))
            if grad_bias is not None:
                grad_bias += exact.sum(0)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_input, grad_weight, None if grad_bias is None else grad_bias.to(weight.dtype), None


def _products(stored: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    matrix, shift = _exact(weight), None if bias is None else _exact(bias)
    output = stored.new_empty(*stored.shape[:-1], len(weight))
    with torch.autocast(stored.device.type, enabled=False):
        for rows, products in zip(_parts(stored), _parts(output), strict=True):
            products.copy_(functional.linear(_exact(rows), matrix, shift))
    return output


def _parts(input: Tensor) -> tuple[Tensor, ...]:
    """[..., features] as matrices of at most `ROWS` rows: views where the input is contiguous."""
    return torch.split(input.reshape(-1, input.shape[-1]), ROWS)


def _exact(input: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, torch.float32))
