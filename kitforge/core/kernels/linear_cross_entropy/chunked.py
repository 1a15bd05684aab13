"""`linear_cross_entropy` in chunks of rows, with gradients computed in the forward pass.

The logits of a whole batch are the largest tensor of a training step. Here one chunk of them exists at a time and is
turned in place into its gradient, softmax minus target. The backward pass only scales the gradients.

The range of fp16 is too small for that: gradients must be scaled before they are rounded. For fp16 the backward pass
recomputes the logits and multiplies their gradients by the incoming one, as autocast with a loss scale does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import product_operands
from kitforge.core.kernels.linear_cross_entropy import reference
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, add_product, chunks
from kitforge.foundation.types import IGNORED


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, shard: VocabularyShard | None = None
) -> Tensor:
    result: Tensor = _Chunked.apply(hidden, weight, targets, torch.is_grad_enabled(), shard)  # type: ignore[no-untyped-call]
    return result


def again(ctx: Any) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]] | None:
    """The loss by the reference, which takes no shard, of the first three tensors that were saved."""
    hidden, weight, targets = ctx.saved_tensors[:3]
    if not ctx.is_whole:
        return None
    return (hidden, weight), lambda hidden, weight: reference.linear_cross_entropy(hidden, weight, targets)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradients: bool, shard: VocabularyShard | None
    ) -> Tensor:
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        ctx.scales_first = torch.float16 in (hidden.dtype, weight.dtype, rounded.dtype)
        wants_hidden = with_gradients and ctx.needs_input_grad[0] and not ctx.scales_first
        wants_weight = with_gradients and ctx.needs_input_grad[1] and not ctx.scales_first
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if wants_weight else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # 1 in the rows that count, 0 in the others.
        counts = (targets != IGNORED).to(exact)
        # The logsumexp of each row.
        normalizers = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            width = weight.shape[0] if shard is None else shard.max_rows
            for part in chunks(hidden.shape[0], width, exact, hidden.device):
                logits = (rounded[part] @ matrix.t()).to(exact)
                loss, normalizers[part] = _loss_into_gradient(logits, targets[part], counts[part], shard)
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
            ctx.save_for_backward(hidden, weight, targets, rounded, counts, normalizers)
        else:
            ctx.save_for_backward(hidden, weight, targets, grad_hidden, grad_weight)
        ctx.is_whole = shard is None
        return total

    @staticmethod
    @by_hand(again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        others = (None,) * 3
        if ctx.scales_first:
            return *_scaled_gradients(ctx, grad), *others
        # The loss is used once in a step, so its gradients are scaled in place; torch refuses to unpack them again.
        scale = grad.to(torch.float32) if grad.dtype in (torch.bfloat16, torch.float16) else grad
        return *(None if each is None else each.mul_(scale) for each in ctx.saved_tensors[3:]), *others


def _scaled_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight, multiplied by the incoming one before they are rounded."""
    _, weight, targets, rounded, counts, normalizers = ctx.saved_tensors
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    matrix, exact = weight.to(rounded.dtype), normalizers.dtype
    grad_hidden = torch.empty(rounded.shape, dtype=ctx.hidden_dtype, device=rounded.device) if wants_hidden else None
    grad_weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if wants_weight else None
    for part in chunks(rounded.shape[0], weight.shape[0], exact, rounded.device):
        logits = (rounded[part] @ matrix.t()).to(exact)
        index = targets[part] - ctx.first
        is_here = (index >= 0) & (index < weight.shape[0])
        logits.sub_(normalizers[part].unsqueeze(1)).exp_().mul_(counts[part].unsqueeze(1))
        if weight.shape[0]:
            index = torch.where(is_here, index, 0)
            logits.scatter_add_(1, index.unsqueeze(1), -(is_here * counts[part]).unsqueeze(1))
        gradient = logits.mul_(grad).to(rounded.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = gradient @ matrix
        if grad_weight is not None:
            add_product(grad_weight, gradient, rounded[part])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _loss_into_gradient(
    logits: Tensor, targets: Tensor, counts: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of logits [rows, vocab], and the logsumexp [rows]. The logits become their gradient in
    place, zero in ignored rows."""
    is_counted = targets != IGNORED
    # Nothing else is ignored: any other target outside the vocabulary must fail in `gather`.
    index = torch.where(is_counted, targets, 0).unsqueeze(1)
    if shard is not None:
        return _sharded_loss(logits, counts, index - shard.first, shard)
    highest = logits.amax(dim=1, keepdim=True)
    logits -= highest
    target_logits = logits.gather(1, index)
    sums = logits.exp_().sum(dim=1, keepdim=True)
    below = sums.log()
    losses = (below - target_logits).squeeze(1)
    logits *= counts.unsqueeze(1) / sums
    logits.scatter_add_(1, index, -counts.unsqueeze(1))
    return torch.where(is_counted, losses, 0).sum(), (below + highest).squeeze(1)


def _sharded_loss(logits: Tensor, counts: Tensor, index: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The same over a shard of the vocabulary: ranks exchange the maximum, the sum and the target logit of each row."""
    rows, width = logits.shape
    is_here = (index >= 0) & (index < width)
    index = torch.where(is_here, index, 0)
    own = torch.full((3, rows), -torch.inf, dtype=logits.dtype, device=logits.device)
    if width:
        own[0] = logits.amax(dim=1)
        # A target that no shard holds makes the loss infinite.
        own[2] = torch.where(is_here, logits.gather(1, index), -torch.inf).squeeze(1)
    logits -= own[0].unsqueeze(1)
    own[1] = logits.exp_().sum(dim=1)
    highest, sums, target_logits = shard.gather(own).unbind(1)  # each [ranks, rows]
    top = highest.amax(dim=0)
    total = (sums * (highest - top).exp()).sum(dim=0)
    normalizers = total.log() + top
    losses = normalizers - target_logits.amax(dim=0)
    logits *= (counts * (own[0] - top).exp() / total).unsqueeze(1)
    if width:
        logits.scatter_add_(1, index, -(counts.unsqueeze(1) * is_here))
    return torch.where(counts == 0, 0, losses).sum(), normalizers
