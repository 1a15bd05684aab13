"""RMSNorm and LayerNorm in Triton, with the residual addition before them: each tensor is read and written once.

The backward pass needs the scale of each row, r = 1 / sqrt(mean((x - m)²) + eps), and the mean m, 0 for RMSNorm. With
g = grad * weight and n = (x - m) * r, the gradient of x is r * (g - mean(g) - n * mean(g * n)), without mean(g) for
RMSNorm. Those of weight and bias, the sums of grad * n and grad over rows, are summed by each
program over its rows and then, by a second kernel, over programs, so their bits do not depend on timing.

The sums over a row wait for all of its threads, and meanwhile the memory would have nothing to do. The forward pass has
so many programs that others read meanwhile. A program of the backward pass, which also sums over its rows, takes many
and asks for the next ones before it computes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.triton.launcher import RepeatedLaunch
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import (
    Kinds,
    kinds_of,
    quotient_up,
    repeated_launch,
    row_block,
    row_programs,
    rows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a kernel over rows is spread over a GPU."""

    per_thread: int  # elements of a thread
    warps: int | None = None  # that run at once on a multiprocessor; without a number each tile has a program


# By pass and whether it is LayerNorm. Warps are as many as find registers; found on an H200, with rows of 768 to 4096.
_PLANS = {
    "forward": (_Plan(per_thread=16), _Plan(per_thread=32)),
    "backward": (_Plan(per_thread=16, warps=16), _Plan(per_thread=16, warps=16)),
    "backward of a used sum": (_Plan(per_thread=16, warps=16), _Plan(per_thread=32, warps=8)),
}
# Elements of the rows that a program takes at a time; a long row is one tile.
_TILE = 1024


@triton_op("kitforge::norm")
def norm(input: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The norm and the scale of each row, [1, rows]: with a bias LayerNorm, without one RMSNorm.

    LayerNorm returns scale and mean, [2, rows].
    """
    output, _, moments = _run(input, None, weight, bias, eps)
    return output, moments


@triton_op("kitforge::norm_of_sum")
def norm_of_sum(
    input: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `input + branch`, that sum, and the moments as above."""
    return _run(input, branch, weight, bias, eps)


def _run(
    input: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, sum and moments; without a branch the sum is the input."""
    output, total, moments = _outputs(input, branch, weight, bias)
    if output.numel():
        rows, stride = _with_rows(input)
        added, added_stride = (rows, stride) if branch is None else _with_rows(branch)
        factors = weight.contiguous()
        shifts = factors if bias is None else bias.contiguous()
        sizes = moments.shape[1], input.shape[-1], stride, added_stride
        launch = _forward(kinds_of(input, branch, weight, bias), sizes, eps, branch is not None, bias is not None)
        launch(rows, added, factors, shifts, output, rows if branch is None else total, moments)
    return output, total, moments


def _with_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor, or a copy, whose rows [dim] are at equal distances, and that distance in elements."""
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = rows_of(tensor)
    return rows, rows.stride(0)


@functools.lru_cache(maxsize=1024)
def _forward(kinds: Kinds, sizes: tuple[int, ...], eps: float, has_branch: bool, has_bias: bool) -> RepeatedLaunch:
    """That of the forward kernel over tensors of those kinds; the sizes are rows, dim and strides."""
    flags = {"HAS_BRANCH": has_branch, "HAS_BIAS": has_bias}
    return _over_rows(_forward_kernel, "forward", has_bias, kinds[0][1], (*sizes, eps), flags)[0]


def _over_rows(
    kernel: Any, name: str, is_layer: bool, device: torch.device, numbers: tuple[Any, ...], flags: dict[str, bool]
) -> tuple[RepeatedLaunch, int]:
    """A launch over rows [n, dim], the first of the numbers, and the most programs that it has."""
    num_rows, dim, *_ = numbers
    plan, features = _PLANS[name][is_layer], row_block(dim)
    block, num_warps, programs = row_programs(
        *(device, num_rows, features), tile=_TILE, per_thread=plan.per_thread, warps=plan.warps or 0
    )
    tiles = quotient_up(num_rows, block)
    programs = tiles if plan.warps is None else min(programs, tiles)
    spread = {"is_queued": True} if plan.warps is None else {"programs": programs}
    options: dict[str, Any] = {"FEATURES": features, "num_warps": num_warps, **flags, **spread}
    return repeated_launch(kernel, tiles, block, *numbers, device=device, **options), programs


def _outputs(
    input: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `_run`."""
    dtype, total_dtype, exact = _dtypes(input.dtype, None if branch is None else branch.dtype, weight.dtype)
    shape = input.shape
    output = input.new_empty(shape, dtype=dtype)
    moments = input.new_empty(1 if bias is None else 2, input.numel() // max(shape[-1], 1), dtype=exact)
    return output, input if branch is None else input.new_empty(shape, dtype=total_dtype), moments


@functools.cache
def _dtypes(
    input: torch.dtype, branch: torch.dtype | None, weight: torch.dtype
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Those of norm, sum and moments."""
    total = input if branch is None else torch.promote_types(input, branch)
    return torch.promote_types(total, weight), total, torch.promote_types(total, torch.float32)


@triton_op("kitforge::norm_backward")
def _backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, moments: Tensor, is_layer: bool
) -> list[Tensor]:
    """The gradients of the sum, which that of its other uses joins, of the weight and, for LayerNorm, of the bias."""
    result, dim = total.new_empty(total.shape), total.shape[-1]
    if not total.numel():
        return [result, *(weight.new_zeros(dim) for _ in range(1 + is_layer))]
    grads, grad_stride = _with_rows(grad)
    rows, stride = _with_rows(total)
    others, others_stride = (grads, grad_stride) if grad_total is None else _with_rows(grad_total)
    factors = weight.contiguous()
    sizes = moments.shape[1], dim, grad_stride, others_stride, stride
    launch, sum_launch, programs = _backward_launches(
        kinds_of(total, grad, grad_total, weight), sizes, grad_total is not None, is_layer
    )
    # By program, of the weight and then of the bias.
    partial = moments.new_empty(programs, (1 + is_layer) * dim)
    launch(rows, grads, others, factors, moments, result, partial)
    sums = [weight.new_empty(dim) for _ in range(1 + is_layer)]
    sum_launch(partial, sums[0], sums[-1])
    return [result, *sums]


@functools.lru_cache(maxsize=1024)
def _backward_launches(
    kinds: Kinds, sizes: tuple[int, ...], has_others: bool, is_layer: bool
) -> tuple[RepeatedLaunch, RepeatedLaunch, int]:
    """Those of the backward kernel and of the one that sums over its programs, and how many those are."""
    device, dim = kinds[0][1], sizes[1]
    name = "backward of a used sum" if has_others else "backward"
    flags = {"HAS_OTHERS": has_others, "IS_LAYER": is_layer}
    launch, programs = _over_rows(_backward_kernel, name, is_layer, device, sizes, flags)
    width, columns = (1 + is_layer) * dim, 32
    sum_launch = repeated_launch(
        *(_sum_kernel, quotient_up(width, columns), columns, programs, dim, width),
        device=device,
        PARTS=min(row_block(programs), 128),
        num_warps=8 if programs > 64 else 4,
        IS_LAYER=is_layer,
    )
    return launch, sum_launch, programs


norm.register_fake(lambda input, weight, bias, _: _outputs(input, None, weight, bias)[::2])
norm_of_sum.register_fake(lambda input, branch, weight, bias, _: _outputs(input, branch, weight, bias))


@_backward.register_fake
def _(
    _grad: Tensor, _grad_total: Tensor | None, total: Tensor, weight: Tensor, _moments: Tensor, is_layer: bool
) -> list[Tensor]:
    return [total.new_empty(total.shape), *(weight.new_empty(weight.shape) for _ in range(1 + is_layer))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, weight, bias, _ = inputs
    ctx.save_for_backward(input, weight, output[1])
    ctx.bias_dtype = None if bias is None else bias.dtype


@by_hand()
def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dtype = ctx.bias_dtype
    of_input, of_weight, *of_bias = _backward(grad, None, *ctx.saved_tensors, dtype is not None)
    return of_input, of_weight, None if dtype is None else of_bias[0].to(dtype), None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, branch, weight, bias, _ = inputs
    normal, total, moments = output
    ctx.save_for_backward(total, weight, moments)
    ctx.dtypes = input.dtype, branch.dtype, None if bias is None else bias.dtype
    ctx.dtype = normal.dtype


@by_hand()
def _gradients_of_sum(
    ctx: Any, grad: Tensor | None, grad_total: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    input_dtype, branch_dtype, bias_dtype = ctx.dtypes
    if grad is None:  # the norm of the sum is not used
        grad = torch.zeros_like(ctx.saved_tensors[0], dtype=ctx.dtype)
    of_sum, of_weight, *of_bias = _backward(grad, grad_total, *ctx.saved_tensors, bias_dtype is not None)
    shift = None if bias_dtype is None else of_bias[0].to(bias_dtype)
    return of_sum.to(input_dtype), of_sum.to(branch_dtype), of_weight, shift, None


norm.register_autograd(_gradients, setup_context=_save)
norm_of_sum.register_autograd(_gradients_of_sum, setup_context=_save_sum)


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
    FEATURES: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)[None, :]
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0)
    shifts = factors
    if HAS_BIAS:
        shifts = tl.load(bias + columns, mask=is_column, other=0)
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = (tile * BLOCK + tl.arange(0, BLOCK))[:, None]
        inside = (row < num_rows) & is_column
        x = tl.load(input + row * stride + columns, mask=inside, other=0).to(EXACT)
        if HAS_BRANCH:
            x += tl.load(branch + row * branch_stride + columns, mask=inside, other=0).to(EXACT)
            # The norm is that of the rounded sum, as torch finds it.
            x = x.to(total.dtype.element_ty)
            tl.store(total + row * dim + columns, x, mask=inside)
            x = x.to(EXACT)
        if HAS_BIAS:
            mean = tl.sum(x, 1, keep_dims=True) / dim
            x = tl.where(inside, x - mean, 0)
            tl.store(moments + num_rows + row, mean, mask=row < num_rows)
        scale = (1 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / dim + eps)).to(EXACT)
        tl.store(moments + row, scale, mask=row < num_rows)
        result = x * scale
        if HAS_BIAS:
            result = result * factors.to(EXACT) + shifts.to(EXACT)
        else:
            # Rounded before the weight multiplies it, as in the reference.
            result = result.to(total.dtype.element_ty).to(EXACT) * factors.to(EXACT)
        tl.store(output + row * dim + columns, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _add_pairs(one, two, other_one, other_two):
    return one + other_one, two + other_two


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
    grad_stride,
    others_stride,
    stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    IS_LAYER: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)[None, :]
    is_column = columns < dim
    factors = tl.load(weight + columns, mask=is_column, other=0)
    of_weight = tl.zeros((BLOCK, FEATURES), EXACT)
    of_bias = tl.zeros((BLOCK, FEATURES), EXACT)
    # Of rows alone: a tensor [BLOCK, 1] would be loaded once for each column of a thread.
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, is_row = number[:, None], (number < num_rows)[:, None]
    x_ahead = tl.load(total + row * stride + columns, mask=is_row & is_column, other=0)
    g_ahead = tl.load(grad + row * grad_stride + columns, mask=is_row & is_column, other=0)
    scale_ahead = tl.load(moments + number, mask=number < num_rows, other=0)
    mean_ahead = scale_ahead
    if IS_LAYER:
        mean_ahead = tl.load(moments + num_rows + number, mask=number < num_rows, other=0)
    for _ in range(steps):
        inside = is_row & is_column
        x = x_ahead.to(EXACT)
        g = g_ahead.to(EXACT)
        scale = scale_ahead[:, None]
        mean = mean_ahead[:, None]
        if HAS_OTHERS:
            other = tl.load(others + row * others_stride + columns, mask=inside, other=0)
        number += tl.num_programs(0) * BLOCK
        following, is_row = number[:, None], (number < num_rows)[:, None]
        x_ahead = tl.load(total + following * stride + columns, mask=is_row & is_column, other=0)
        g_ahead = tl.load(grad + following * grad_stride + columns, mask=is_row & is_column, other=0)
        scale_ahead = tl.load(moments + number, mask=number < num_rows, other=0)
        if IS_LAYER:
            mean_ahead = tl.load(moments + num_rows + number, mask=number < num_rows, other=0)
            x = tl.where(inside, x - mean, 0)
        normal = x * scale
        of_weight += g * normal
        if IS_LAYER:
            of_bias += g
        g = g * factors.to(EXACT)
        if IS_LAYER:
            along, level = tl.reduce((g * normal, g), 1, _add_pairs, keep_dims=True)
            slope = (g - normal * (along / dim) - level / dim) * scale
        else:
            slope = (g - normal * (tl.sum(g * normal, 1, keep_dims=True) / dim)) * scale
        if HAS_OTHERS:
            slope += other.to(EXACT)
        tl.store(result + row * dim + columns, slope.to(result.dtype.element_ty), mask=inside)
        row = following
    column = tl.arange(0, FEATURES)
    partial += tl.program_id(0).to(tl.int64) * dim * (2 if IS_LAYER else 1)
    tl.store(partial + column, tl.sum(of_weight, 0), mask=column < dim)
    if IS_LAYER:
        tl.store(partial + dim + column, tl.sum(of_bias, 0), mask=column < dim)


@triton.jit
def _sum_kernel(
    partial,
    of_weight,
    of_bias,
    programs,
    dim,
    width,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    IS_LAYER: tl.constexpr,
):
    for step in range(steps):
        column = (tl.program_id(0) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        sums = tl.zeros((PARTS, BLOCK), EXACT)
        for start in range(0, programs, PARTS):
            part = start + tl.arange(0, PARTS)[:, None]
            inside = (part < programs) & (column < width)[None, :]
            sums += tl.load(partial + part * width + column[None, :], mask=inside, other=0)
        found = tl.sum(sums, 0).to(of_weight.dtype.element_ty)
        tl.store(of_weight + column, found, mask=column < dim)
        if IS_LAYER:
            tl.store(of_bias + column - dim, found, mask=(column >= dim) & (column < width))
