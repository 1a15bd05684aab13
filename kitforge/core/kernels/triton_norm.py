"""RMSNorm and LayerNorm in Triton, with the residual addition before them: each tensor is read and written once.

The backward pass needs the scale of each row, r = 1 / sqrt(mean((x - m)²) + eps), and the mean m, 0 for RMSNorm. With
g = grad * weight and n = (x - m) * r, the gradient of x is r * (g - mean(g) - n * mean(g * n)), without mean(g) for
RMSNorm. Those of weight and bias, the sums of grad * n and grad over rows, are summed by each
program over its rows and then over programs, so their bits do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_runtime import grid, launch_grid, row_block, rows_of


@torch.library.custom_op("kitforge::norm", mutates_args=())
def norm(
    input: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `input + branch`, that sum (empty without a branch), and the mean and scale of each row [2, rows].

    With a bias it is LayerNorm, without one RMSNorm.
    """
    output, total, moments = _outputs(input, branch, weight)
    rows = rows_of(input)
    added = rows if branch is None else rows_of(branch)
    factors = weight.contiguous()
    shifts = factors if bias is None else bias.contiguous()
    if rows.numel():
        sizes = *rows.shape, rows.stride(0), added.stride(0)
        launch_grid(
            _forward_kernel,
            *(len(rows), row_block(rows.shape[1])),
            *(rows, added, factors, shifts, output, total, moments),
            *(*sizes, eps),
            HAS_BRANCH=branch is not None,
            HAS_BIAS=bias is not None,
        )
    return output, total, moments


def _outputs(input: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `norm`."""
    dtype = input.dtype if branch is None else torch.promote_types(input.dtype, branch.dtype)
    output = input.new_empty(input.shape, dtype=torch.promote_types(dtype, weight.dtype))
    exact = torch.promote_types(dtype, torch.float32)
    moments = input.new_empty(2, input.numel() // max(input.shape[-1], 1), dtype=exact)
    return output, input.new_empty(0 if branch is None else input.shape, dtype=dtype), moments


@torch.library.custom_op("kitforge::norm_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, moments: Tensor, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum, which that of its other uses joins, and of weight and bias (empty for RMSNorm)."""
    grads, rows, factors = rows_of(grad), rows_of(total), weight.contiguous()
    others = grads if grad_total is None else rows_of(grad_total)
    num_rows, dim = rows.shape
    result = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    # By program, of the weight and of the bias.
    partial = torch.zeros(2, *grid(total.device, num_rows), dim, dtype=moments.dtype, device=total.device)
    if rows.numel():
        sizes = num_rows, dim, partial.shape[1], grads.stride(0), others.stride(0), rows.stride(0)
        launch_grid(
            _backward_kernel,
            *(num_rows, row_block(dim)),
            *(rows, grads, others, factors, moments, result, partial),
            *sizes,
            HAS_OTHERS=grad_total is not None,
            IS_LAYER=is_layer,
        )
    of_weight, of_bias = partial.sum(1).to(weight.dtype).unbind()
    return result, of_weight.clone(), of_bias.clone() if is_layer else of_bias.new_empty(0)


norm.register_fake(lambda input, branch, weight, *_: _outputs(input, branch, weight))


@_backward.register_fake
def _(
    _grad: Tensor, _grad_total: Tensor | None, total: Tensor, weight: Tensor, _moments: Tensor, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight) * is_layer)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, branch, weight, bias, _ = inputs
    ctx.save_for_backward(input if branch is None else output[1], weight, output[2])
    ctx.dtypes = input.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype


def _gradients(ctx: Any, grad: Tensor, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    input_dtype, branch_dtype, bias_dtype = ctx.dtypes
    others = None if branch_dtype is None else grad_total
    total, of_weight, of_bias = _backward(grad, others, *ctx.saved_tensors, bias_dtype is not None)
    of_branch = None if branch_dtype is None else total.to(branch_dtype)
    return total.to(input_dtype), of_branch, of_weight, None if bias_dtype is None else of_bias.to(bias_dtype), None


norm.register_autograd(_gradients, setup_context=_save)


@triton.jit
def _forward_kernel(
    input,
    branch,
    weight,
    bias,
    output,
    total,
    moments,
    num_rows,
    dim,
    stride,
    branch_stride,
    eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0).to(EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        inside = columns < tl.where(row < num_rows, dim, 0)
        x = tl.load(input + row * stride + columns, mask=inside, other=0).to(EXACT)
        if HAS_BRANCH:
            x += tl.load(branch + row * branch_stride + columns, mask=inside, other=0).to(EXACT)
            # The norm is that of the rounded sum, as torch finds it.
            tl.store(total + row * dim + columns, x.to(total.dtype.element_ty), mask=inside)
            x = x.to(total.dtype.element_ty).to(EXACT)
        mean = tl.zeros((), EXACT)
        if HAS_BIAS:
            mean += tl.sum(x, 0) / dim
            x = tl.where(inside, x - mean, 0)
        scale = 1 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
        result = x * scale
        if HAS_BIAS:
            result = result * factors + tl.load(bias + columns, mask=is_column, other=0).to(EXACT)
        else:
            # Rounded before the weight multiplies it, as in the reference.
            result = result.to(total.dtype.element_ty).to(EXACT) * factors
        tl.store(output + row * dim + columns, result.to(output.dtype.element_ty), mask=inside)
        tl.store(moments + row, mean, mask=row < num_rows)
        tl.store(moments + num_rows + row, scale.to(EXACT), mask=row < num_rows)


@triton.jit
def _backward_kernel(
    total,
    grad,
    others,
    weight,
    moments,
    result,
    partial,
    num_rows,
    dim,
    num_partial,
    grad_stride,
    others_stride,
    stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    IS_LAYER: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0).to(EXACT)
    of_weight = tl.zeros((BLOCK,), EXACT)
    of_bias = tl.zeros((BLOCK,), EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        inside = columns < tl.where(row < num_rows, dim, 0)
        x = tl.load(total + row * stride + columns, mask=inside, other=0).to(EXACT)
        g = tl.load(grad + row * grad_stride + columns, mask=inside, other=0).to(EXACT)
        mean = tl.load(moments + row, mask=row < num_rows, other=0)
        scale = tl.load(moments + num_rows + row, mask=row < num_rows, other=0)
        normal = tl.where(inside, x - mean, 0) * scale
        of_weight += g * normal
        if IS_LAYER:
            of_bias += g
        g = g * factors
        slope = g - normal * (tl.sum(g * normal, 0) / dim)
        if IS_LAYER:
            slope = slope - tl.sum(g, 0) / dim
        slope = slope * scale
        if HAS_OTHERS:
            slope += tl.load(others + row * others_stride + columns, mask=inside, other=0).to(EXACT)
        tl.store(result + row * dim + columns, slope.to(result.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * dim + columns, of_weight, mask=is_column)
    if IS_LAYER:
        tl.store(partial + (num_partial + tl.program_id(0)) * dim + columns, of_bias, mask=is_column)
