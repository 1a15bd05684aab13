"""RMSNorm and LayerNorm in Triton, with the residual addition before them: each tensor is read and written once.

The backward pass needs the scale of each row, r = 1 / sqrt(mean((x - m)²) + eps), and the mean m, 0 for RMSNorm. With
g = grad * weight and n = (x - m) * r, the gradient of x is r * (g - mean(g) - n * mean(g * n)), without mean(g) for
RMSNorm. Those of weight and bias, the sums of grad * n and grad over rows, are summed by each
program over its rows and then, by a second kernel, over programs, so their bits do not depend on timing.

The sums over a row wait for all of its threads, and meanwhile the memory would have nothing to do. The forward pass has
so many programs that others read meanwhile. A program of the backward pass, which also sums over its rows, takes many
and asks for the next ones before it computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_ops import triton_op
from kitforge.core.kernels.triton_runtime import launch_grid, quotient_up, row_block, row_programs, rows_of


@final
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
def norm(
    input: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `input + branch`, that sum (empty without a branch), and the scale of each row, [1, rows].

    With a bias it is LayerNorm, without one RMSNorm. That of LayerNorm returns scale and mean, [2, rows].
    """
    output, total, moments = _outputs(input, branch, weight, bias)
    rows = rows_of(input)
    added = rows if branch is None else rows_of(branch)
    factors = weight.contiguous()
    shifts = factors if bias is None else bias.contiguous()
    if rows.numel():
        sizes = *rows.shape, rows.stride(0), added.stride(0)
        tiles, block, options = _tiles(rows.device, *rows.shape, "forward", bias is not None)
        launch_grid(
            *(_forward_kernel, tiles, block),
            *(rows, added, factors, shifts, output, total, moments),
            *(*sizes, eps),
            HAS_BRANCH=branch is not None,
            HAS_BIAS=bias is not None,
            **options,
        )
    return output, total, moments


@functools.lru_cache(maxsize=1024)
def _tiles(device: torch.device, num_rows: int, dim: int, name: str, is_layer: bool) -> tuple[int, int, dict[str, Any]]:
    """Tiles, the rows of one, and the options of a launch over rows [n, dim]."""
    plan, features = _PLANS[name][is_layer], row_block(dim)
    block, num_warps, programs = row_programs(
        *(device, num_rows, features), tile=_TILE, per_thread=plan.per_thread, warps=plan.warps or 0
    )
    tiles = quotient_up(num_rows, block)
    spread = {"is_queued": True} if plan.warps is None else {"programs": min(programs, tiles)}
    return tiles, block, {"FEATURES": features, "num_warps": num_warps, **spread}


def _outputs(
    input: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `norm`."""
    dtype = input.dtype if branch is None else torch.promote_types(input.dtype, branch.dtype)
    output = input.new_empty(input.shape, dtype=torch.promote_types(dtype, weight.dtype))
    exact = torch.promote_types(dtype, torch.float32)
    kinds = 1 if bias is None else 2
    moments = input.new_empty(kinds, input.numel() // max(input.shape[-1], 1), dtype=exact)
    return output, input.new_empty(0 if branch is None else input.shape, dtype=dtype), moments


@triton_op("kitforge::norm_backward")
def _backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, moments: Tensor, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum, which that of its other uses joins, and of weight and bias (empty for RMSNorm)."""
    grads, rows, factors = rows_of(grad), rows_of(total), weight.contiguous()
    others = grads if grad_total is None else rows_of(grad_total)
    num_rows, dim = rows.shape
    result = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    if not rows.numel():
        return result, weight.new_zeros(dim), weight.new_zeros(dim * is_layer)
    name = "backward" if grad_total is None else "backward of a used sum"
    tiles, block, options = _tiles(rows.device, num_rows, dim, name, is_layer)
    # By program, of the weight and then of the bias.
    partial = moments.new_empty(options["programs"], (1 + is_layer) * dim)
    launch_grid(
        *(_backward_kernel, tiles, block),
        *(rows, grads, others, factors, moments, result, partial),
        *(num_rows, dim, grads.stride(0), others.stride(0), rows.stride(0)),
        HAS_OTHERS=grad_total is not None,
        IS_LAYER=is_layer,
        **options,
    )
    return result, *_summed(partial, weight, is_layer)


def _summed(partial: Tensor, weight: Tensor, is_layer: bool) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias [dim] from the sums of each program, [programs, dim] or [programs, 2 dim]."""
    programs, width = partial.shape
    of_weight, of_bias = weight.new_empty(len(weight)), weight.new_empty(len(weight) * is_layer)
    columns = 32
    launch_grid(
        *(_sum_kernel, quotient_up(width, columns), columns),
        *(partial, of_weight, of_bias, programs, len(weight), width),
        PARTS=min(row_block(programs), 128),
        num_warps=8 if programs > 64 else 4,
        IS_LAYER=is_layer,
    )
    return of_weight, of_bias


norm.register_fake(lambda input, branch, weight, bias, _: _outputs(input, branch, weight, bias))


@_backward.register_fake
def _(
    _grad: Tensor, _grad_total: Tensor | None, total: Tensor, weight: Tensor, _moments: Tensor, is_layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight) * is_layer)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    input, branch, weight, bias, _ = inputs
    ctx.save_for_backward(input if branch is None else output[1], weight, output[2])
    ctx.dtypes = input.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype
    ctx.dtype = output[0].dtype


def _gradients(ctx: Any, grad: Tensor | None, grad_total: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
    input_dtype, branch_dtype, bias_dtype = ctx.dtypes
    others = None if branch_dtype is None else grad_total
    if grad is None:  # the norm of the sum is not used
        grad = torch.zeros_like(ctx.saved_tensors[0], dtype=ctx.dtype)
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
