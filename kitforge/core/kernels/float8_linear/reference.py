"""The definition of `float8_linear`: products of tensors that are rounded to FP8 with one scale each.

Activations and weights are rounded to e4m3, gradients to e5m2, which has a larger range (Micikevicius et al., "FP8
formats for deep learning", 2022). Scales are those of the largest elements of a call ("tensorwise, dynamic").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.mixed_precision import compute_dtype
from kitforge.core.kernels.recomputation import kept

# a [m, k] and b [k, n] in FP8, their scales, and the dtype of the product.
Product = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


class Float8LinearKernel(Protocol):
    """`input [..., in] @ weight [out, in].T + bias [out]` and its gradients by products in FP8; the result has
    autocast's dtype where autocast is on. `in`, `out` and, for the gradient of the weight, the rows of the input should
    be multiples of 16, which matrix units need."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


def to_float8(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor divided by its scale and rounded, and the scale, 0-dim in fp32."""
    largest = torch.finfo(dtype).max
    exact = tensor.to(torch.float32)
    top = exact.abs().amax() if tensor.numel() else exact.new_zeros(())
    scale = top.clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    return (exact / scale).clamp(-largest, largest).to(dtype), scale


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Float8LinearKernel`."""
    return apply_float8(_exact_product, input, weight, bias)


def apply_float8(product: Product, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`float8_linear` by that product."""
    dtype = compute_dtype(input)
    rows: Tensor = _Float8.apply(input.reshape(-1, input.shape[-1]), weight, product, dtype)  # type: ignore[no-untyped-call]
    output = rows.view(*input.shape[:-1], len(weight))
    return output if bias is None else output + bias.to(dtype)


def _exact_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to(dtype)


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, product: Product, dtype: torch.dtype) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            (rows, row_scale), (matrix, scale) = (to_float8(each, torch.float8_e4m3fn) for each in (input, weight))
            # A byte an element, where the inputs would take two or four.
            ctx.save_for_backward(rows, row_scale, matrix, scale)
            ctx.product, ctx.dtypes = product, (input.dtype, weight.dtype)
            return kept(product, rows, matrix.t(), row_scale, scale, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, row_scale, matrix, scale = ctx.saved_tensors
        (of_input, of_weight), (input_dtype, weight_dtype) = ctx.needs_input_grad[:2], ctx.dtypes
        grads, grad_scale = to_float8(grad, torch.float8_e5m2)
        grad_input = ctx.product(grads, matrix, grad_scale, scale, input_dtype) if of_input else None
        grad_weight = ctx.product(grads.t(), rows, grad_scale, row_scale, weight_dtype) if of_weight else None
        return grad_input, grad_weight, None, None
