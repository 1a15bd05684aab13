"""`rms_norm` in Triton: one read of the input and one write of the output, forward and backward.

The backward pass needs the scale of each row, r = 1 / sqrt(mean(x²) + eps). With g = grad * weight and n = x * r, the
gradient of the input is r * (g - n * mean(g * n)); that of the weight, the sum of grad * n over rows, is summed by each
program over its rows and then over programs, so its bits do not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_runtime import grid, launch, row_block, rows_of


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `RMSNormKernel`."""
    result: Tensor = _forward(input, weight, eps)[0]
    return result


@torch.library.custom_op("kitforge::rms_norm", mutates_args=())
def _forward(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and the scale of each row."""
    rows, factors = rows_of(input), weight.contiguous()
    dim = rows.shape[1]
    output = torch.empty(input.shape, dtype=torch.promote_types(input.dtype, weight.dtype), device=input.device)
    scales = torch.empty(len(rows), dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)
    if rows.numel():
        sizes = len(rows), dim, rows.stride(0)
        launch(_forward_kernel, len(rows), row_block(dim), rows, factors, output, scales, *sizes, eps)
    return output, scales


@torch.library.custom_op("kitforge::rms_norm_backward", mutates_args=())
def _backward(grad: Tensor, input: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight."""
    gradients, rows, factors = rows_of(grad), rows_of(input), weight.contiguous()
    dim = rows.shape[1]
    grad_input = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    partial = torch.zeros(*grid(input.device, len(rows)), dim, dtype=scales.dtype, device=input.device)
    if rows.numel():
        sizes = len(rows), dim, gradients.stride(0), rows.stride(0)
        arguments = gradients, rows, factors, scales, grad_input, partial
        launch(_backward_kernel, len(rows), row_block(dim), *arguments, *sizes)
    return grad_input, partial.sum(0).to(weight.dtype)


@_forward.register_fake
def _(input: Tensor, weight: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    scales = input.new_empty(input.numel() // input.shape[-1], dtype=torch.promote_types(input.dtype, torch.float32))
    return input.new_empty(input.shape, dtype=torch.promote_types(input.dtype, weight.dtype)), scales


_backward.register_fake(
    lambda _, input, weight, _scales: (input.new_empty(input.shape), weight.new_empty(weight.shape))
)
_forward.register_autograd(
    lambda ctx, grad, _: (*_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
)


@triton.jit
def _forward_kernel(
    input,
    weight,
    output,
    scales,
    num_rows,
    dim,
    stride,
    eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0).to(EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        inside = columns < tl.where(row < num_rows, dim, 0)
        x = tl.load(input + row * stride + columns, mask=inside, other=0).to(EXACT)
        scale = 1 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
        normal = (x * scale).to(input.dtype.element_ty).to(EXACT)
        tl.store(output + row * dim + columns, (normal * factors).to(output.dtype.element_ty), mask=inside)
        tl.store(scales + row, scale.to(EXACT), mask=row < num_rows)


@triton.jit
def _backward_kernel(
    grad,
    input,
    weight,
    scales,
    grad_input,
    partial,
    num_rows,
    dim,
    grad_stride,
    stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0).to(EXACT)
    total = tl.zeros((BLOCK,), EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        inside = columns < tl.where(row < num_rows, dim, 0)
        x = tl.load(input + row * stride + columns, mask=inside, other=0).to(EXACT)
        g = tl.load(grad + row * grad_stride + columns, mask=inside, other=0).to(EXACT)
        scale = tl.load(scales + row, mask=row < num_rows, other=0)
        normal = x * scale
        total += g * normal
        g = g * factors
        result = scale * (g - normal * (tl.sum(g * normal, 0) / dim))
        tl.store(grad_input + row * dim + columns, result.to(grad_input.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * dim + columns, total, mask=is_column)
