"""`linear_log_probs` in chunks of rows. One Triton kernel reads the logits of a chunk once for the log-probs and the
entropies; in the backward pass, another one turns the recomputed logits into their gradient in place.

A target outside of the vocabulary gives NaN: naming it would need a synchronization.
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


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `LinearLogProbsKernel`."""
    log_probs, entropies, _ = _forward(*product_operands(hidden, weight), targets, temperature)
    return log_probs, entropies


@torch.library.custom_op("kitforge::linear_log_probs", mutates_args=())
def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, entropies, and the logsumexp of each row."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    results = torch.empty(3, hidden.shape[0], dtype=exact, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in chunks(hidden.shape[0], weight.shape[0], hidden.dtype):
            _launch(_forward_kernel, hidden[part] @ weight.t(), targets[part], results[:, part], temperature)
    log_probs, entropies, normalisers = results.unbind()
    return log_probs.clone(), entropies.clone(), normalisers.clone()


@torch.library.custom_op("kitforge::linear_log_probs_backward", mutates_args=())
def _backward(
    grad_log_probs: Tensor,
    grad_entropies: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    entropies: Tensor,
    normalisers: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and weight, by that of the scaled logits: (target - p) for the log-probability and
    -p (log p + H) for the entropy H."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = weight.new_zeros(weight.shape, dtype=entropies.dtype)
    saved = torch.stack([grad_log_probs, grad_entropies, entropies, normalisers])
    with torch.autocast(hidden.device.type, enabled=False):
        for part in chunks(hidden.shape[0], weight.shape[0], hidden.dtype):
            logits = hidden[part] @ weight.t()
            _launch(_backward_kernel, logits, targets[part], saved[:, part], temperature)
            grad_hidden[part] = logits @ weight
            add_product(grad_weight, logits, hidden[part])
    return grad_hidden, grad_weight.to(weight.dtype)


def _launch(kernel: Any, logits: Tensor, targets: Tensor, numbers: Tensor, temperature: float) -> None:
    """Run a kernel over contiguous logits [rows, vocab]; `numbers` [several, rows] are those of each row."""
    sizes = *logits.shape, targets.stride(0), numbers.stride(0)
    launch(kernel, *logits_tiles(logits), logits, targets, numbers, *sizes, temperature)


@_forward.register_fake
def _(hidden: Tensor, _weight: Tensor, _targets: Tensor, _temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    log_probs, entropies, normalisers = (hidden.new_empty(hidden.shape[0], dtype=exact) for _ in range(3))
    return log_probs, entropies, normalisers


_backward.register_fake(
    lambda _, _entropies, hidden, weight, *_rest: (hidden.new_empty(hidden.shape), weight.new_empty(weight.shape))
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.temperature = inputs[3]


_forward.register_autograd(
    lambda ctx, *grads: (*_backward(*grads[:2], *ctx.saved_tensors, ctx.temperature), None, None), setup_context=_save
)


@triton.jit
def _forward_kernel(
    logits,
    targets,
    numbers,
    num_rows,
    width,
    target_stride,
    stride,
    temperature,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        limit = tl.where(row < num_rows, width, 0)
        target = tl.load(targets + row * target_stride, mask=row < num_rows, other=-1)
        is_known = (target >= 0) & (target < width)
        source = logits + row * width
        wanted = tl.load(source + target, mask=is_known, other=float("nan")).to(EXACT) / temperature
        highest = tl.full((), float("-inf"), EXACT)
        total = tl.zeros((), EXACT)
        # The sum of exp(x - highest) * (x - highest).
        product = tl.zeros((), EXACT)
        for start in range(0, limit, BLOCK):
            x = tl.load(source + start + columns, mask=start + columns < limit, other=float("-inf")).to(EXACT)
            x = x / temperature
            top = tl.maximum(highest, tl.max(x, 0))
            shift = tl.where(total > 0, highest - top, 0.0)
            product = (product + total * shift) * tl.exp(shift)
            total = total * tl.exp(shift)
            below = x - top
            weight = tl.exp(below)
            total += tl.sum(weight, 0)
            # 0 * -inf is NaN: a masked or impossible token adds nothing.
            product += tl.sum(tl.where(weight > 0, weight * below, 0.0), 0)
            highest = top
        normaliser = tl.log(total) + highest
        tl.store(numbers + row, wanted - normaliser, mask=row < num_rows)
        tl.store(numbers + stride + row, tl.log(total) - product / total, mask=row < num_rows)
        tl.store(numbers + 2 * stride + row, normaliser, mask=row < num_rows)


@triton.jit
def _backward_kernel(
    logits,
    targets,
    numbers,
    num_rows,
    width,
    target_stride,
    stride,
    temperature,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        limit = tl.where(row < num_rows, width, 0)
        is_row = row < num_rows
        target = tl.load(targets + row * target_stride, mask=is_row, other=-1)
        of_chosen = tl.load(numbers + row, mask=is_row, other=0)
        of_entropy = tl.load(numbers + stride + row, mask=is_row, other=0)
        entropy = tl.load(numbers + 2 * stride + row, mask=is_row, other=0)
        normaliser = tl.load(numbers + 3 * stride + row, mask=is_row, other=0)
        source = logits + row * width
        for start in range(0, limit, BLOCK):
            inside = start + columns < limit
            x = tl.load(source + start + columns, mask=inside, other=float("-inf")).to(EXACT)
            log_prob = x / temperature - normaliser
            probability = tl.exp(log_prob)
            slope = -of_chosen - (log_prob + entropy) * of_entropy
            gradient = tl.where(probability > 0, probability * slope, 0.0)
            gradient += tl.where(start + columns == target, of_chosen, 0.0)
            tl.store(source + start + columns, (gradient / temperature).to(logits.dtype.element_ty), mask=inside)
