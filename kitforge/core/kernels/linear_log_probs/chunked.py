"""`linear_log_probs` in chunks of rows. The backward pass recomputes the log-probs of each chunk, unless those of all
rows are few enough to be saved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import product_operands
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, chunks, merge_statistics
from kitforge.core.kernels.linear_log_probs import reference

# Bytes of log-probs that are saved for the backward pass.
KEPT_BYTES = 256 * 2**20


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor]
    if shard is None:
        result = _Chunked.apply(hidden, weight, targets, temperature, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    else:
        result = _VocabularyParallel.apply(hidden, weight, targets, temperature, shard)  # type: ignore[no-untyped-call]
    return result


def _logits(rows: Tensor, matrix: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    """Products divided by the temperature [rows, vocab]."""
    with torch.autocast(rows.device.type, enabled=False):
        return (rows @ matrix.t()).to(exact).div_(temperature)


def _again(ctx: Any) -> tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, Tensor]]]:
    hidden, weight, targets = ctx.saved_tensors[:3]
    return (hidden, weight), lambda *two: reference.linear_log_probs(two[0], two[1], targets, ctx.temperature)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        chosen = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        entropies = torch.empty_like(chosen)
        keeps = with_gradients and hidden.shape[0] * max(weight.shape[0], 1) * exact.itemsize <= KEPT_BYTES
        kept: list[Tensor] = []
        for part in chunks(hidden.shape[0], weight.shape[0], exact, hidden.device):
            log_probs = _logits(rounded[part], matrix, temperature, exact).log_softmax(-1)
            torch.gather(log_probs, 1, targets[part].unsqueeze(1), out=chosen[part].unsqueeze(1))
            entropies[part] = -(log_probs.exp() * log_probs).sum(-1)
            if keeps:
                kept.append(log_probs)
        ctx.save_for_backward(rounded, matrix, targets, entropies, *kept)
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        return chosen, entropies

    @staticmethod
    @by_hand(_again)
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rounded, matrix, targets, entropies, *kept = ctx.saved_tensors

        def log_probs(number: int, part: slice) -> Tensor:
            if not kept:
                return _logits(rounded[part], matrix, ctx.temperature, entropies.dtype).log_softmax(-1)
            saved: Tensor = kept[number]
            return saved

        grads, saved = (grad_chosen, grad_entropies, grad_chosen), (rounded, matrix, entropies)
        return *_backward(ctx, saved, targets, grads, log_probs), None, None, None


class _VocabularyParallel(torch.autograd.Function):
    """The same over a shard of the vocabulary. Ranks exchange four numbers a row, of all rows at once, since shards of
    different sizes have different chunks. The backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, shard: VocabularyShard
    ) -> tuple[Tensor, Tensor]:
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        width, num_rows = weight.shape[0], hidden.shape[0]
        # The columns of targets in this shard; 0 for those of other shards.
        columns = targets - shard.first
        is_here = (columns >= 0) & (columns < width)
        columns = torch.where(is_here, columns, 0)
        own = torch.zeros(4, num_rows, dtype=exact, device=hidden.device)
        own[::3] = -torch.inf
        for part in chunks(num_rows, width, exact, hidden.device) if width else []:
            logits = _logits(rounded[part], matrix, temperature, exact)
            own[0, part] = logits.amax(dim=1)
            chosen = logits.gather(1, columns[part].unsqueeze(1)).squeeze(1)
            # A target that no shard holds gets the log-prob -inf.
            own[3, part] = torch.where(is_here[part], chosen, -torch.inf)
            logits -= own[0, part].unsqueeze(1)
            own[1, part] = logits.exp().sum(dim=1)
            own[2, part] = (logits.exp() * logits).sum(dim=1)
        log_probs, entropies, normalizers = merge_statistics(shard.gather(own))
        ctx.save_for_backward(rounded, matrix, columns, is_here, normalizers, entropies)
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        return log_probs, entropies

    @staticmethod
    @by_hand()
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rounded, matrix, columns, is_here, normalizers, entropies = ctx.saved_tensors

        def log_probs(_number: int, part: slice) -> Tensor:
            logits = _logits(rounded[part], matrix, ctx.temperature, entropies.dtype)
            return logits.sub_(normalizers[part].unsqueeze(1))

        saved = rounded, matrix, entropies
        grads = grad_chosen, grad_entropies, torch.where(is_here, grad_chosen, 0)
        return *_backward(ctx, saved, columns, grads, log_probs), None, None, None


def _backward(
    ctx: Any,
    saved: tuple[Tensor, Tensor, Tensor],
    columns: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    log_probs_of: Callable[[int, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight, by that of the scaled logits: (target - p) for the log-probability and
    -p (log p + H) for the entropy H. The third of `grads` is that of the targets in this shard, at `columns`."""
    rounded, matrix, entropies = saved
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    grad_hidden = torch.zeros(rounded.shape, dtype=ctx.dtypes[0], device=rounded.device) if wants_hidden else None
    grad_weight = torch.zeros(matrix.shape, dtype=entropies.dtype, device=matrix.device) if wants_weight else None
    width = matrix.shape[0]
    for number, part in enumerate(chunks(len(rounded), width, entropies.dtype, rounded.device) if width else []):
        of_chosen, of_entropy, of_target = (each[part].unsqueeze(1) for each in grads)
        log_probs = log_probs_of(number, part)
        gradient = (log_probs + entropies[part].unsqueeze(1)).mul_(-of_entropy).sub_(of_chosen).mul_(log_probs.exp())
        gradient.scatter_add_(1, columns[part].unsqueeze(1), of_target)
        gradient = gradient.div_(ctx.temperature).to(rounded.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = gradient @ matrix
        if grad_weight is not None:
            grad_weight += gradient.t() @ rounded[part]
    return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtypes[1])
