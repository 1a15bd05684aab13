"""`linear_log_probs` in chunks of rows. The backward pass recomputes the log-probs of each chunk, unless those of all
rows are few enough to be saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.mixed_precision import product_operands
from kitforge.core.kernels.vocabulary import VocabularyShard, chunks, merge_statistics, soft_cap_

# Bytes of log-probs that are saved for the backward pass.
KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Scaling:
    """How products become logits."""

    temperature: float
    softcap: float | None

    def logits(self, rows: Tensor, matrix: Tensor, exact: torch.dtype) -> Tensor:
        """Capped and divided by the temperature [rows, vocab]."""
        with torch.autocast(rows.device.type, enabled=False):
            logits = (rows @ matrix.t()).to(exact)
        soft_cap_(logits, self.softcap)
        return logits.div_(self.temperature)

    def into_products_(self, gradient: Tensor, log_probs: Tensor, normalisers: Tensor) -> Tensor:
        """Turn the gradient of the logits into that of the products, in place."""
        if self.softcap is not None:
            ratio = (log_probs + normalisers.unsqueeze(1)).mul_(self.temperature / self.softcap)
            gradient.mul_(1 - ratio.square_())
        return gradient.div_(self.temperature)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """See `LinearLogProbsKernel`."""
    result: tuple[Tensor, Tensor]
    scaling = _Scaling(temperature, softcap)
    if shard is None:
        result = _Chunked.apply(hidden, weight, targets, scaling, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    else:
        result = _VocabularyParallel.apply(hidden, weight, targets, scaling, shard)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scaling: _Scaling, with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        chosen = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        entropies, normalisers = torch.empty_like(chosen), torch.empty_like(chosen)
        keeps = with_gradients and hidden.shape[0] * max(weight.shape[0], 1) * exact.itemsize <= KEPT_BYTES
        kept: list[Tensor] = []
        for part in chunks(hidden.shape[0], weight.shape[0], exact, hidden.device):
            logits = scaling.logits(rounded[part], matrix, exact)
            if scaling.softcap is not None:
                normalisers[part] = logits.logsumexp(-1)
            log_probs = logits.log_softmax(-1)
            torch.gather(log_probs, 1, targets[part].unsqueeze(1), out=chosen[part].unsqueeze(1))
            entropies[part] = -(log_probs.exp() * log_probs).sum(-1)
            if keeps:
                kept.append(log_probs)
        ctx.save_for_backward(rounded, matrix, targets, normalisers, entropies, *kept)
        ctx.scaling, ctx.dtypes = scaling, (hidden.dtype, weight.dtype)
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rounded, matrix, targets, normalisers, entropies, *kept = ctx.saved_tensors

        def log_probs(number: int, part: slice) -> Tensor:
            if not kept:
                return ctx.scaling.logits(rounded[part], matrix, entropies.dtype).log_softmax(-1)  # type: ignore[no-any-return]
            saved: Tensor = kept[number]
            return saved

        grads, saved = (grad_chosen, grad_entropies, grad_chosen), (rounded, matrix, normalisers, entropies)
        return *_backward(ctx, saved, targets, grads, log_probs), None, None, None


class _VocabularyParallel(torch.autograd.Function):
    """The same over a shard of the vocabulary. Ranks exchange four numbers a row, of all rows at once, since shards of
    different sizes have different chunks. The backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scaling: _Scaling,
        shard: VocabularyShard,
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
            logits = scaling.logits(rounded[part], matrix, exact)
            own[0, part] = logits.amax(dim=1)
            chosen = logits.gather(1, columns[part].unsqueeze(1)).squeeze(1)
            # A target that no shard holds gets the log-prob -inf.
            own[3, part] = torch.where(is_here[part], chosen, -torch.inf)
            logits -= own[0, part].unsqueeze(1)
            own[1, part] = logits.exp().sum(dim=1)
            own[2, part] = (logits.exp() * logits).sum(dim=1)
        log_probs, entropies, normalisers = merge_statistics(shard.gather(own))
        ctx.save_for_backward(rounded, matrix, columns, is_here, normalisers, entropies)
        ctx.scaling, ctx.dtypes = scaling, (hidden.dtype, weight.dtype)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rounded, matrix, columns, is_here, normalisers, entropies = ctx.saved_tensors

        def log_probs(_number: int, part: slice) -> Tensor:
            logits: Tensor = ctx.scaling.logits(rounded[part], matrix, entropies.dtype)
            return logits.sub_(normalisers[part].unsqueeze(1))

        saved = rounded, matrix, normalisers, entropies
        grads = grad_chosen, grad_entropies, torch.where(is_here, grad_chosen, 0)
        return *_backward(ctx, saved, columns, grads, log_probs), None, None, None


def _backward(
    ctx: Any,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    columns: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    log_probs_of: Callable[[int, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight, by that of the scaled logits: (target - p) for the log-probability and
    -p (log p + H) for the entropy H. The third of `grads` is that of the targets in this shard, at `columns`."""
    rounded, matrix, normalisers, entropies = saved
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    grad_hidden = torch.zeros(rounded.shape, dtype=ctx.dtypes[0], device=rounded.device) if wants_hidden else None
    grad_weight = torch.zeros(matrix.shape, dtype=entropies.dtype, device=matrix.device) if wants_weight else None
    width = matrix.shape[0]
    for number, part in enumerate(chunks(len(rounded), width, entropies.dtype, rounded.device) if width else []):
        of_chosen, of_entropy, of_target = (each[part].unsqueeze(1) for each in grads)
        log_probs = log_probs_of(number, part)
        gradient = (log_probs + entropies[part].unsqueeze(1)).mul_(-of_entropy).sub_(of_chosen).mul_(log_probs.exp())
        gradient.scatter_add_(1, columns[part].unsqueeze(1), of_target)
        gradient = ctx.scaling.into_products_(gradient, log_probs, normalisers[part]).to(rounded.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = gradient @ matrix
        if grad_weight is not None:
            grad_weight += gradient.t() @ rounded[part]
    return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtypes[1])
