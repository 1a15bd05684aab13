"""`rotary` in Triton: one read and one write of each feature. The gradient of a rotation is the inverse rotation."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_runtime import device_description, launch_grid, row_block


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See `RotaryKernel`."""
    result: Tensor = _rotate(input, cos, sin, interleaved, False)
    return result


@torch.library.custom_op("kitforge::rotary", mutates_args=())
def _rotate(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    batch, heads, length, dim = input.shape
    pairs = cos.shape[-1]
    # [batch, length, heads, dim] in memory, as the projection that it comes from and the attention that reads it.
    output = input.new_empty(batch, length, heads, dim).transpose(1, 2)
    if output.numel():
        angles = [each.expand(batch, length, pairs) for each in (cos, sin)]
        num_rows, pair_block, rest_block = batch * heads * length, row_block(pairs), row_block(dim - 2 * pairs)
        rows = row_block(max(1, device_description(input.device).row_elements // max(pair_block, rest_block)))
        launch_grid(
            *(_rotary_kernel, triton.cdiv(num_rows, rows), rows),
            *(input, *angles, output, num_rows, heads, length, dim, pairs),
            *(*input.stride(), *angles[0].stride(), *angles[1].stride(), *output.stride()),
            num_warps=4,
            SIGN=-1 if inverse else 1,
            INTERLEAVED=interleaved,
            PAIRS=pair_block,
            REST=rest_block if dim > 2 * pairs else 0,
        )
    return output


@_rotate.register_fake
def _(input: Tensor, _cos: Tensor, _sin: Tensor, _interleaved: bool, _inverse: bool) -> Tensor:
    batch, heads, length, dim = input.shape
    return input.new_empty(batch, length, heads, dim).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
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
    num_rows,
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
    out_batch,
    out_head,
    out_token,
    out_feature,
    SIGN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    steps,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    EXACT: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)[None, :]
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + pairs
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        row = (tile * BLOCK + tl.arange(0, BLOCK))[:, None]
        # Rows are (batch, token, head): neighbours share their angles.
        head = row % heads
        token = (row // heads) % length
        sample = row // heads // length
        inside = (row < num_rows) & (pair < pairs)
        source = input + sample * in_batch + head * in_head + token * in_token
        target = output + sample * out_batch + head * out_head + token * out_token
        c = tl.load(cos + sample * cos_batch + token * cos_token + pair * cos_pair, mask=inside, other=0).to(EXACT)
        s = tl.load(sin + sample * sin_batch + token * sin_token + pair * sin_pair, mask=inside, other=0).to(EXACT)
        s = s * SIGN
        x = tl.load(source + first * in_feature, mask=inside, other=0).to(EXACT)
        y = tl.load(source + second * in_feature, mask=inside, other=0).to(EXACT)
        tl.store(target + first * out_feature, (x * c - y * s).to(output.dtype.element_ty), mask=inside)
        tl.store(target + second * out_feature, (y * c + x * s).to(output.dtype.element_ty), mask=inside)
        if REST > 0:
            feature = 2 * pairs + tl.arange(0, REST)[None, :]
            kept = (row < num_rows) & (feature < dim)
            tl.store(target + feature * out_feature, tl.load(source + feature * in_feature, mask=kept), mask=kept)
