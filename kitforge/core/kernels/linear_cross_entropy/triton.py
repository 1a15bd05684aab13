"""`linear_cross_entropy` in chunks of rows, as in `chunked.py`. One Triton kernel turns the logits of a chunk into
their gradient in place and in their own dtype: two reads and one write, without an fp32 copy.

A target outside of the vocabulary makes the loss NaN: naming it would need a synchronization.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.linear_cross_entropy.chunked import add_product, chunks
from kitforge.core.kernels.mixed_precision import product_operands
from kitforge.core.kernels.triton_runtime import launch, logits_tiles


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """See `LinearCrossEntropyKernel`."""
    with_gradients = torch.is_grad_enabled()
    wants = with_gradients and hidden.requires_grad, with_gradients and weight.requires_grad
    rounded, matrix = product_operands(hidden, weight)
    result: Tensor = _forward(rounded, matrix, targets, *wants)[0]
    return result


@torch.library.custom_op("kitforge::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and the gradients of hidden and weight, empty where they are not wanted."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    num_rows = hidden.shape[0]
    losses = torch.zeros(num_rows, dtype=exact, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape, dtype=exact) if wants_weight else weight.new_empty(0, dtype=exact)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in chunks(num_rows, weight.shape[0], hidden.dtype):
            logits = hidden[part] @ weight.t()
            sizes = *logits.shape, targets.stride(0)
            launch(_loss_kernel, *logits_tiles(logits), logits, targets[part], losses[part], *sizes)
            if wants_hidden:
                grad_hidden[part] = logits @ weight
            if wants_weight:
                add_product(grad_weight, logits, hidden[part])
    return losses.sum(), grad_hidden, grad_weight.to(weight.dtype)


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, _targets: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    grad_weight = weight.new_empty(weight.shape if wants_weight else 0)
    return hidden.new_empty((), dtype=exact), hidden.new_empty(hidden.shape if wants_hidden else 0), grad_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.wants = inputs[3:]
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    grad_hidden, grad_weight = (
        saved * grad if wanted else None for saved, wanted in zip(ctx.saved_tensors, ctx.wants, strict=True)
    )
    return grad_hidden, grad_weight, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


@triton.jit
def _loss_kernel(
    logits,
    targets,
    losses,
    num_rows,
    width,
    target_stride,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        # A row beyond the last one has no columns.
        limit = tl.where(row < num_rows, width, 0)
        target = tl.load(targets + row * target_stride, mask=row < num_rows, other=-100)
        is_known = (target >= 0) & (target < width)
        source = logits + row * width
        wanted = tl.load(source + target, mask=is_known, other=0).to(EXACT)
        # The logsumexp in one pass: each block rescales the sum before it to the new maximum (Milakov, 2018).
        highest = tl.full((), float("-inf"), EXACT)
        total = tl.zeros((), EXACT)
        for start in range(0, limit, BLOCK):
            x = tl.load(source + start + columns, mask=start + columns < limit, other=float("-inf")).to(EXACT)
            top = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp(highest - top) + tl.sum(tl.exp(x - top), 0)
            highest = top
        counted = tl.where(target == -100, 0.0, 1.0)
        for start in range(0, limit, BLOCK):
            inside = start + columns < limit
            x = tl.load(source + start + columns, mask=inside, other=float("-inf")).to(EXACT)
            gradient = tl.exp(x - highest) / total - tl.where(start + columns == target, 1.0, 0.0)
            # Zero, not a product with zero, in rows that do not count: their logits may be NaN.
            gradient = tl.where(counted > 0, gradient, 0.0)
            tl.store(source + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)
        loss = tl.where(is_known, tl.log(total) + highest - wanted, float("nan"))
        tl.store(losses + row, tl.where(target == -100, 0.0, loss).to(EXACT), mask=row < num_rows)
