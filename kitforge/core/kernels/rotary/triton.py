"""`rotary` in Triton: one read and one write of each feature. The gradient of a rotation is the inverse rotation.

A program takes some heads of some tokens at a time, so the angles of a token are read once for all of those heads.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.launcher import RepeatedLaunch
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import (
    Kinds,
    device_description,
    kinds_of,
    quotient_up,
    repeated_launch,
    row_block,
)

# Heads of a tile at most, and pairs of features of a thread; found on an H200.
_HEADS = 32
_PER_THREAD = 8


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    result: Tensor = _rotate(input, cos, sin, interleaved, False)
    return result


@triton_op("kitforge::rotary")
def _rotate(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    output = _like(input)
    if output.numel():
        strides = input.stride(), cos.stride(), sin.stride()
        launch = _launch_over(kinds_of(input, cos, sin), input.shape, cos.shape, strides, interleaved, inverse)
        launch(input, cos, sin, output)
    return output


def _like(input: Tensor) -> Tensor:
    """[batch, length, heads, dim] in memory, as the projection that it comes from and the attention that reads it."""
    batch, heads, length, dim = input.shape
    return input.new_empty(batch, length, heads, dim).transpose(1, 2)


@functools.lru_cache(maxsize=1024)
def _launch_over(
    kinds: Kinds,
    shape: torch.Size,
    angle_shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    interleaved: bool,
    inverse: bool,
) -> RepeatedLaunch:
    """That over input [batch, heads, length, dim] and angles [batch or 1, length, pairs], all with those strides."""
    (batch, heads, length, dim), pairs = shape, angle_shape[2]
    device, (in_strides, *angle_strides) = kinds[0][1], strides
    pair_block, rest_block = row_block(pairs), row_block(dim - 2 * pairs)
    width = max(pair_block, rest_block)
    rows = max(1, device_description(device).row_elements // width)
    head_block = min(row_block(heads), _HEADS, rows)
    tokens = min(max(1, rows // head_block), row_block(length))
    head_tiles, token_tiles = quotient_up(heads, head_block), quotient_up(length, tokens)
    # One sample of angles stands for all.
    turns = [(0 if angle_shape[0] == 1 else by_sample, *others) for by_sample, *others in angle_strides]
    return repeated_launch(
        *(_rotary_kernel, batch * token_tiles * head_tiles, tokens),
        *(batch * token_tiles, token_tiles, head_tiles, heads, length, dim, pairs),
        *(*in_strides, *turns[0], *turns[1]),
        device=device,
        num_warps=min(max(head_block * tokens * width // (32 * _PER_THREAD), 1), 8),
        is_queued=True,
        HEADS=head_block,
        SIGN=-1 if inverse else 1,
        INTERLEAVED=interleaved,
        PAIRS=pair_block,
        REST=rest_block if dim > 2 * pairs else 0,
    )


_rotate.register_fake(lambda input, *_: _like(input))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:3])
    ctx.interleaved, ctx.inverse = inputs[3:]


_rotate.register_autograd(
    lambda ctx, grad: (_rotate(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), *4 * [None]),
    setup_context=_save,
)


@triton.jit
def _rotary_kernel(
    input,
    cos,
    sin,
    output,
    num_groups,
    token_tiles,
    head_tiles,
    heads,
    length,
    dim,
    pairs,
    in_batch,
    in_head,
    in_token,
    in_feature,
    cos_batch,
    cos_token,
    cos_pair,
    sin_batch,
    sin_token,
    sin_pair,
    steps,
    HEADS: tl.constexpr,
    SIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    EXACT: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)[None, None, :]
    feature = tl.arange(0, 2 * PAIRS)[None, None, :]
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        # A tile is BLOCK tokens of a sample and HEADS of their heads; a program beyond the last one has no token.
        group = tile // head_tiles
        sample = group // token_tiles
        token = ((group % token_tiles) * BLOCK + tl.arange(0, BLOCK))[:, None, None]
        head = ((tile % head_tiles) * HEADS + tl.arange(0, HEADS))[None, :, None]
        is_row = (token < tl.where(group < num_groups, length, 0)) & (head < heads)
        source = input + sample * in_batch + head * in_head + token * in_token
        target = output + ((sample * length + token) * heads + head) * dim
        is_angle = (token < length) & (pair < pairs)
        c = tl.load(cos + sample * cos_batch + token * cos_token + pair * cos_pair, mask=is_angle, other=0).to(EXACT)
        s = tl.load(sin + sample * sin_batch + token * sin_token + pair * sin_pair, mask=is_angle, other=0).to(EXACT)
        s = s * SIGN
        if INTERLEAVED:
            # Neighbors are loaded and stored together: every other element alone takes twice the transactions.
            inside = is_row & (feature < 2 * pairs)
            both = tl.load(source + feature * in_feature, mask=inside, other=0).to(EXACT)
            x, y = tl.split(both.reshape(BLOCK, HEADS, PAIRS, 2))
            turned = tl.join(x * c - y * s, y * c + x * s).reshape(BLOCK, HEADS, 2 * PAIRS)
            tl.store(target + feature, turned.to(output.dtype.element_ty), mask=inside)
        else:
            inside = is_row & (pair < pairs)
            x = tl.load(source + pair * in_feature, mask=inside, other=0).to(EXACT)
            y = tl.load(source + (pair + pairs) * in_feature, mask=inside, other=0).to(EXACT)
            tl.store(target + pair, (x * c - y * s).to(output.dtype.element_ty), mask=inside)
            tl.store(target + pair + pairs, (y * c + x * s).to(output.dtype.element_ty), mask=inside)
        if REST > 0:
            rest = 2 * pairs + tl.arange(0, REST)[None, None, :]
            kept = is_row & (rest < dim)
            tl.store(target + rest, tl.load(source + rest * in_feature, mask=kept), mask=kept)
