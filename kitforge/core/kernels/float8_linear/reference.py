"""The definition of `float8_linear`: products of tensors that are rounded to FP8 with one scale each.

Activations and weights are rounded to e4m3, gradients to e5m2, which has a larger range (Micikevicius et al., "FP8
formats for deep learning", 2022). Scales are those of the largest elements of a call ("tensorwise, dynamic").
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.autograd.recomputation import kept

# Of a tensor [m, n] and a dtype: its rows [m, n] and its columns [n, m] in FP8, and their scale. The lengths n of rows
# and m of columns may be padded with zeros.
Quantize = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor, Tensor]]
# a [m, k] and b [n, k] in FP8, their scales, the dtype of the product a @ b.T, and whether it is a gradient.
Product = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]


class Float8LinearKernel(Protocol):
    """`input [..., in] @ weight [out, in].T + bias [out]` and its gradients by products in FP8; the result has
    autocast's dtype where autocast is on. `in`, `out` and, for the gradient of the weight, the rows of the input should
    be multiples of 16, which matrix units need."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


def to_float8(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor times the reciprocal of its scale and rounded, and the scale, 0-dim in fp32."""
    largest = torch.finfo(dtype).max
    exact = tensor.to(torch.float32)
    top = exact.abs().amax() if tensor.numel() else exact.new_zeros(())
    scale = top.clamp(min=torch.finfo(torch.float32).tiny * largest) / largest
    return (exact * scale.reciprocal()).clamp(-largest, largest).to(dtype), scale


def rows_and_columns(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`to_float8` of a tensor [m, n], as rows and, over the same memory, as columns."""
    rows, scale = to_float8(tensor, dtype)
    return rows, rows.t(), scale


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply_float8(rows_and_columns, _exact_product, input, weight, bias)


def apply_float8(quantize: Quantize, product: Product, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`float8_linear` by those two functions."""
    dtype = compute_dtype(input)
    flat = input.reshape(-1, input.shape[-1])
    rows: Tensor = _Float8.apply(flat, weight, quantize, product, dtype)  # type: ignore[no-untyped-call]
    output = rows.view(*input.shape[:-1], len(weight))
    return output if bias is None else output + bias.to(dtype)


def _exact_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, is_gradient: bool
) -> Tensor:
    del is_gradient
    with torch.autocast(a.device.type, enabled=False):
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, quantize: Quantize, product: Product, dtype: torch.dtype
    ) -> Tensor:
        rows, columns, scale = quantize(input, torch.float8_e4m3fn)
        matrix, turned, size = quantize(weight, torch.float8_e4m3fn)
        # A byte an element, where the inputs would take two or four.
        ctx.save_for_backward(columns, scale, turned, size)
        ctx.quantize, ctx.product, ctx.dtypes = quantize, product, (input.dtype, weight.dtype)
        return kept(product, rows, matrix, scale, size, dtype, False)

    @staticmethod
    @by_hand(fix="train without FP8")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        columns, scale, turned, size = ctx.saved_tensors
        (of_input, of_weight), (input_dtype, weight_dtype) = ctx.needs_input_grad[:2], ctx.dtypes
        grads, by_column, grad_scale = ctx.quantize(grad, torch.float8_e5m2)
        grad_input = ctx.product(grads, turned, grad_scale, size, input_dtype, True) if of_input else None
        grad_weight = ctx.product(by_column, columns, grad_scale, scale, weight_dtype, True) if of_weight else None
        return grad_input, grad_weight, None, None, None
