"""Moves of rows between tokens and experts in Triton, forward and backward, without atomic additions, and the zeros
behind the rows of the last expert.

Each program takes tokens and the k rows of each: the gradient of a token is the sum of those of its rows, and that of a
row belongs to one token. The loads of all k rows are issued before the first of them is needed.
"""

import functools
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
    launch_grid,
    quotient_up,
    repeated_launch,
    row_tiles,
    rows_of,
)

# Bytes of a row that a warp reads at once: 16 for each thread.
WARP_BYTES = 512
# That a program of the kernel for zeros writes at once.
ZERO_ELEMENTS = 1024


@triton_op("kitforge::moe_spread")
def spread(tokens: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """Rows [T * k, dim]: at `positions` [T, k] the tokens [T, dim], times `weights` [T, k]."""
    rows = tokens.new_empty(positions.numel(), tokens.shape[1])
    _launch("spread", rows_of(tokens), positions, weights, rows)
    return rows


@triton_op("kitforge::moe_combine")
def combine(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """Tokens [T, dim]: the sums of `rows[positions]` times weights [T, k]."""
    tokens = rows.new_empty(len(positions), rows.shape[1])
    _launch("combine", rows_of(rows), positions, weights, tokens)
    return tokens


@triton_op("kitforge::moe_weight_gradient")
def weight_gradient(grad: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """[T, k]: the products of the gradient of a token [T, dim] with its rows."""
    result = _like_weights(rows, positions)
    _launch("weight", rows_of(grad), positions, rows_of(rows), result)
    return result


def zero_past(rows: Tensor, ends: Tensor) -> None:
    """Zeros in the rows [R, width], contiguous, from the last of the ends [E] on; reads and writes nothing else."""
    # A few programs: most calls have no such row.
    tiles = min(quotient_up(rows.numel(), ZERO_ELEMENTS), 264)
    if tiles:
        sizes = rows.shape[1], rows.numel(), len(ends)
        launch_grid(_zero_kernel, tiles, ZERO_ELEMENTS, rows, ends, *sizes, is_queued=True)


def _launch(name: str, source: Tensor, positions: Tensor, other: Tensor | None, output: Tensor) -> None:
    """Run a kernel over the tokens of `positions`; `other` is weights, or the rows that a gradient multiplies."""
    if output.numel():
        read = source if other is None else other if name == "weight" else other.contiguous()
        strides = source.stride(0), read.stride(0)
        launch = _launch_over(
            name, kinds_of(source, positions, read), positions.shape, source.shape[1], strides, other is not None
        )
        launch(source, positions.contiguous(), read, output)


@functools.lru_cache(maxsize=1024)
def _launch_over(
    name: str, kinds: Kinds, shape: torch.Size, dim: int, strides: tuple[int, int], has_other: bool
) -> RepeatedLaunch:
    """That over `positions` of that shape, and over rows of `dim` elements and those strides."""
    (num_tokens, k), (dtype, device) = shape, kinds[0]
    features, tokens, tiles = row_tiles(device, num_tokens, dim)
    kernels = {"spread": _spread_kernel, "combine": _combine_kernel, "weight": _weight_kernel}
    constants = {} if name == "weight" else {"HAS_WEIGHTS": has_other}
    return repeated_launch(
        *(kernels[name], tiles, tokens, num_tokens, dim, *strides),
        device=device,
        num_warps=min(max(tokens * features * dtype.itemsize // WARP_BYTES, 1), 16),
        is_queued=True,
        K=k,
        FEATURES=features,
        **constants,
    )


def _like_weights(rows: Tensor, positions: Tensor) -> Tensor:
    return rows.new_empty(positions.shape, dtype=torch.promote_types(rows.dtype, torch.float32))


spread.register_fake(lambda tokens, positions, _: tokens.new_empty(positions.numel(), tokens.shape[1]))
combine.register_fake(lambda rows, positions, _: rows.new_empty(len(positions), rows.shape[1]))
weight_gradient.register_fake(lambda _, rows, positions: _like_weights(rows, positions))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


@by_hand()
def _of_spread(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
    tokens, positions, weights = ctx.saved_tensors
    of_weights = None if weights is None else weight_gradient(tokens, grad, positions).to(weights.dtype)
    return combine(grad, positions, weights), None, of_weights


@by_hand()
def _of_combine(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
    rows, positions, weights = ctx.saved_tensors
    of_weights = None if weights is None else weight_gradient(grad, rows, positions).to(weights.dtype)
    return spread(grad, positions, weights), None, of_weights


spread.register_autograd(_of_spread, setup_context=_save)
combine.register_autograd(_of_combine, setup_context=_save)


@triton.jit
def _spread_kernel(
    source,
    positions,
    weights,
    rows,
    num_tokens,
    dim,
    stride,
    weight_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        token = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        inside = is_token[:, None] & (columns < dim)[None, :]
        x = tl.load(source + token[:, None] * stride + columns[None, :], mask=inside, other=0)
        for choice in tl.static_range(K):
            position = tl.load(positions + token * K + choice, mask=is_token, other=0)
            y = x
            if HAS_WEIGHTS:
                weight = tl.load(weights + token * weight_stride + choice, mask=is_token, other=0).to(EXACT)
                y = (x.to(EXACT) * weight[:, None]).to(x.dtype)
            tl.store(rows + position[:, None] * dim + columns[None, :], y, mask=inside)


@triton.jit
def _combine_kernel(
    source,
    positions,
    weights,
    tokens,
    num_tokens,
    dim,
    stride,
    weight_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        token = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        inside = is_token[:, None] & (columns < dim)[None, :]
        total = tl.zeros((BLOCK, FEATURES), EXACT)
        for choice in tl.static_range(K):
            position = tl.load(positions + token * K + choice, mask=is_token, other=0)
            x = tl.load(source + position[:, None] * stride + columns[None, :], mask=inside, other=0).to(EXACT)
            if HAS_WEIGHTS:
                weight = tl.load(weights + token * weight_stride + choice, mask=is_token, other=0).to(EXACT)
                x = x * weight[:, None]
            total += x
        tl.store(tokens + token[:, None] * dim + columns[None, :], total.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def _weight_kernel(
    source,
    positions,
    rows,
    result,
    num_tokens,
    dim,
    stride,
    row_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        token = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_token = token < num_tokens
        inside = is_token[:, None] & (columns < dim)[None, :]
        x = tl.load(source + token[:, None] * stride + columns[None, :], mask=inside, other=0).to(EXACT)
        for choice in tl.static_range(K):
            position = tl.load(positions + token * K + choice, mask=is_token, other=0)
            y = tl.load(rows + position[:, None] * row_stride + columns[None, :], mask=inside, other=0).to(EXACT)
            tl.store(result + token * K + choice, tl.sum(x * y, 1), mask=is_token)


@triton.jit
def _zero_kernel(rows, ends, width, size, num_experts, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    start = tl.load(ends + num_experts - 1, mask=num_experts > 0, other=0).to(tl.int64) * width
    for first in range(start + tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(rows + offsets, tl.zeros((BLOCK,), rows.dtype.element_ty), mask=offsets < size)
