"""`linear_cross_entropy` in chunks of rows, with gradients computed in the forward pass.

The logits of a whole batch are the largest tensor of a training step. Here one chunk of them exists at a time and is
turned in place into its gradient, softmax minus target. The backward pass only scales the gradients.

The range of fp16 is too small for that: gradients must be scaled before they are rounded. For fp16 the backward pass
recomputes the logits and multiplies their gradients by the incoming one, as autocast with a loss scale does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.mixed_precision import product_operands

# Bytes of logits of one chunk: enough for full speed of the products, few enough for the CPU caches.
CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Marks `weight` as a vocabulary-parallel shard, with the collective that gathers the results of all shards."""

    first: int  # the vocabulary index of the first row
    max_rows: int  # rows of the largest shard, so that all ranks make as many exchanges
    gather: Callable[[Tensor], Tensor]  # all-gathers a tensor, stacked in a new first dim


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """See `LinearCrossEntropyKernel`. With a `shard` of the vocabulary the loss is global on every rank, and the
    gradient of `hidden` is the partial sum of this shard."""
    gradients = torch.is_grad_enabled()
    result: Tensor = _Chunked.apply(hidden, weight, targets, gradients, shard)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        with_gradients: bool,
        shard: VocabularyShard | None,
    ) -> Tensor:
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        ctx.scales_first = torch.float16 in (hidden.dtype, weight.dtype, rounded.dtype)
        wants_hidden = with_gradients and ctx.needs_input_grad[0] and not ctx.scales_first
        wants_weight = with_gradients and ctx.needs_input_grad[1] and not ctx.scales_first
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if wants_weight else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # The logsumexp of each row.
        normalisers = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(hidden.shape[0], weight.shape[0] if shard is None else shard.max_rows, exact):
                logits = (rounded[part] @ matrix.t()).to(exact)
                loss, normalisers[part] = _loss_into_gradient(logits, targets[part], shard)
                total += loss
                gradient = logits.to(rounded.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = gradient @ matrix
                if grad_weight is not None:
                    add_product(grad_weight, gradient, rounded[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if ctx.scales_first and with_gradients:
            ctx.first, ctx.hidden_dtype = 0 if shard is None else shard.first, hidden.dtype
            ctx.save_for_backward(rounded, weight, targets, normalisers)
        else:
            ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.scales_first:
            return (*_scaled_gradients(ctx, grad), None, None, None)
        # The loss is used once in a step, so its gradients are scaled in place; torch refuses to unpack them again.
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad.to(torch.float32) if grad.dtype in (torch.bfloat16, torch.float16) else grad
        return (
            None if grad_hidden is None else grad_hidden.mul_(scale),
            None if grad_weight is None else grad_weight.mul_(scale),
            None,
            None,
            None,
        )


def chunks(num_rows: int, width: int, dtype: torch.dtype) -> list[slice]:
    """Slices of rows whose logits [rows, width] have about `CHUNK_BYTES`."""
    rows = max(1, CHUNK_BYTES // (max(width, 1) * dtype.itemsize))
    return [slice(start, start + rows) for start in range(0, num_rows, rows)]


def _scaled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight, multiplied by the incoming one before they are rounded."""
    rounded, weight, targets, normalisers = ctx.saved_tensors
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    matrix, exact = weight.to(rounded.dtype), normalisers.dtype
    grad_hidden = torch.empty(rounded.shape, dtype=ctx.hidden_dtype, device=rounded.device) if wants_hidden else None
    grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if wants_weight else None
    for part in chunks(rounded.shape[0], weight.shape[0], exact):
        logits = (rounded[part] @ matrix.t()).to(exact)
        counted, index = targets[part] != -100, targets[part] - ctx.first
        is_here = counted & (index >= 0) & (index < weight.shape[0])
        logits.sub_(normalisers[part].unsqueeze(1)).exp_().mul_(counted.unsqueeze(1))
        if weight.shape[0]:
            index = torch.where(is_here, index, 0)
            logits.scatter_add_(1, index.unsqueeze(1), -is_here.to(exact).unsqueeze(1))
        gradient = logits.mul_(grad).to(rounded.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = gradient @ matrix
        if grad_weight is not None:
            add_product(grad_weight, gradient, rounded[part])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _loss_into_gradient(logits: Tensor, targets: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """The sum of the losses of logits [rows, vocab], and the logsumexp [rows]. The logits become their gradient in
    place, zero in ignored rows."""
    counted = targets != -100
    # Only -100 is ignored: any other target outside the vocabulary must fail in `gather`.
    index = torch.where(counted, targets, 0).unsqueeze(1)
    if shard is not None:
        return _sharded_loss(logits, counted, index - shard.first, shard)
    highest = logits.amax(dim=1, keepdim=True)
    logits -= highest
    target_logits = logits.gather(1, index)
    sums = logits.exp_().sum(dim=1, keepdim=True)
    below = sums.log()
    losses = (below - target_logits).squeeze(1)
    logits *= counted.unsqueeze(1) / sums
    logits.scatter_add_(1, index, -counted.to(logits.dtype).unsqueeze(1))
    return torch.where(counted, losses, 0).sum(), (below + highest).squeeze(1)


def _sharded_loss(logits: Tensor, counted: Tensor, index: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The same over a shard of the vocabulary: ranks exchange the maximum, the sum and the target logit of each row."""
    rows, width = logits.shape
    is_here = (index >= 0) & (index < width)
    index = torch.where(is_here, index, 0)
    own = torch.empty(3, rows, dtype=logits.dtype, device=logits.device)
    own[0] = logits.amax(dim=1) if width else -torch.inf
    own[2] = torch.where(is_here, logits.gather(1, index), 0).squeeze(1) if width else 0
    logits -= own[0].unsqueeze(1)
    own[1] = logits.exp_().sum(dim=1)
    highest, sums, target_logits = shard.gather(own).unbind(1)  # each [ranks, rows]
    top = highest.amax(dim=0)
    total = (sums * (highest - top).exp()).sum(dim=0)
    normalisers = total.log() + top
    losses = normalisers - target_logits.sum(dim=0)
    logits *= (counted * (own[0] - top).exp() / total).unsqueeze(1)
    if width:
        logits.scatter_add_(1, index, -(counted.unsqueeze(1) & is_here).to(logits.dtype))
    return torch.where(counted, losses, 0).sum(), normalisers


def add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """`total += gradient.T @ hidden`, fused where the dtypes allow."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total += gradient.t() @ hidden
