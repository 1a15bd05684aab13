"""`linear_log_probs` in chunks of rows. The log-probabilities of all tokens are kept for the backward pass while they
are few; of more, each chunk is computed again there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.linear_cross_entropy.chunked import VocabularyShard
from kitforge.core.kernels.mixed_precision import compute_dtype, storage_dtype

# Bytes of logits computed at once, and of those that are kept from the forward to the backward pass.
CHUNK_BYTES = 32 * 2**20
KEPT_BYTES = 256 * 2**20


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """See `LinearLogProbsKernel`. With a `shard` both are those of the whole vocabulary, on every holder; the
    gradient of `hidden` is the part that comes from these rows."""
    apply = _Chunked.apply if shard is None else _VocabularyParallel.apply
    further = () if shard is None else (shard,)
    result: tuple[Tensor, Tensor] = apply(hidden, weight, targets, temperature, torch.is_grad_enabled(), *further)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        rounded, matrix = _operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        chosen = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
        entropies = torch.empty_like(chosen)
        row_bytes = max(weight.shape[0], 1) * exact.itemsize
        keeps = with_gradients and hidden.shape[0] * row_bytes <= KEPT_BYTES
        kept: list[Tensor] = []
        for part in _chunks(hidden.shape[0], row_bytes):
            log_probs = _log_probs(rounded[part], matrix, temperature, exact)
            torch.gather(log_probs, 1, targets[part].unsqueeze(1), out=chosen[part].unsqueeze(1))
            entropies[part] = _entropies(log_probs)
            if keeps:
                kept.append(log_probs)
        ctx.save_for_backward(rounded, matrix, targets, entropies, *kept)
        ctx.temperature, ctx.row_bytes = temperature, row_bytes
        ctx.dtypes = hidden.dtype, weight.dtype
        return chosen, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rounded, matrix, targets, entropies, *kept = ctx.saved_tensors
        exact = entropies.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty(rounded.shape, dtype=ctx.dtypes[0], device=rounded.device) if wants_hidden else None
        grad_weight = torch.zeros(matrix.shape, dtype=exact, device=matrix.device) if wants_weight else None
        for number, part in enumerate(_chunks(rounded.shape[0], ctx.row_bytes)):
            log_probs = kept[number] if kept else _log_probs(rounded[part], matrix, ctx.temperature, exact)
            gradient = _of_logits(log_probs, targets[part], entropies[part], grad_chosen[part], grad_entropies[part])
            gradient = (gradient / ctx.temperature).to(rounded.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ matrix
            if grad_weight is not None:
                grad_weight += gradient.t() @ rounded[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtypes[1]), None, None, None


class _VocabularyParallel(torch.autograd.Function):
    """The same over a part of the vocabulary: holders exchange four numbers a row, all rows at once, as chunks of parts
    of different sizes would not meet. Logits are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        _with_gradients: bool,
        shard: VocabularyShard,
    ) -> tuple[Tensor, Tensor]:
        rounded, matrix = _operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        width, num_rows = weight.shape[0], hidden.shape[0]
        columns, is_here = _local_columns(targets, shard, width)
        # The maximum, the sum of exponentials under it, their product with the logits below it, the target's logit.
        own = torch.zeros(4, num_rows, dtype=exact, device=hidden.device)
        own[0] = -torch.inf
        for part in _chunks(num_rows, max(width, 1) * exact.itemsize) if width else []:
            logits = _logits(rounded[part], matrix, temperature, exact)
            own[0, part] = logits.amax(dim=1)
            own[3, part] = torch.where(is_here[part], logits.gather(1, columns[part].unsqueeze(1)).squeeze(1), 0)
            logits -= own[0, part].unsqueeze(1)
            own[1, part] = logits.exp().sum(dim=1)
            own[2, part] = (logits.exp() * logits).sum(dim=1)
        highest, sums, products, chosen = shard.gather(own).unbind(1)  # each [holders, rows]
        top = highest.amax(dim=0)
        below = torch.where(sums > 0, highest - top, 0)
        total = (sums * below.exp()).sum(dim=0)
        normaliser = total.log() + top
        mean = ((products + sums * below) * below.exp()).sum(dim=0) / total
        entropies = total.log() - mean
        ctx.save_for_backward(rounded, matrix, columns, is_here, normaliser, entropies)
        ctx.temperature, ctx.dtypes = temperature, (hidden.dtype, weight.dtype)
        return chosen.sum(dim=0) - normaliser, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        rounded, matrix, columns, is_here, normaliser, entropies = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact, width = entropies.dtype, matrix.shape[0]
        grad_hidden = torch.zeros(rounded.shape, dtype=ctx.dtypes[0], device=rounded.device) if wants_hidden else None
        grad_weight = torch.zeros(matrix.shape, dtype=exact, device=matrix.device) if wants_weight else None
        for part in _chunks(rounded.shape[0], max(width, 1) * exact.itemsize) if width else []:
            log_probs = _logits(rounded[part], matrix, ctx.temperature, exact).sub_(normaliser[part].unsqueeze(1))
            gradient = (log_probs + entropies[part].unsqueeze(1)).mul_(-grad_entropies[part].unsqueeze(1))
            gradient = gradient.sub_(grad_chosen[part].unsqueeze(1)).mul_(log_probs.exp_())
            own = torch.where(is_here[part], grad_chosen[part], 0)
            gradient.scatter_add_(1, columns[part].unsqueeze(1), own.unsqueeze(1))
            gradient = (gradient / ctx.temperature).to(rounded.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ matrix
            if grad_weight is not None:
                grad_weight += gradient.t() @ rounded[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtypes[1]), None, None, None, None


def _local_columns(targets: Tensor, shard: VocabularyShard, width: int) -> tuple[Tensor, Tensor]:
    """Where the targets stand among these rows, 0 where they do not, and whether they do."""
    columns = targets - shard.first
    is_here = (columns >= 0) & (columns < width)
    return torch.where(is_here, columns, 0), is_here


def _operands(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the dtype that products are taken in on this device."""
    half = storage_dtype(hidden)
    if half is not None:
        return hidden.to(half).to(weight.dtype), weight
    dtype = compute_dtype(hidden)
    return hidden.to(dtype), weight.to(dtype)


def _chunks(num_rows: int, row_bytes: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // row_bytes)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _logits(rows: Tensor, matrix: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        logits = (rows @ matrix.t()).to(exact)
    return logits.div_(temperature)


def _log_probs(rows: Tensor, matrix: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    return _logits(rows, matrix, temperature, exact).log_softmax(-1)


def _entropies(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _of_logits(log_probs: Tensor, targets: Tensor, entropies: Tensor, of_chosen: Tensor, of_entropy: Tensor) -> Tensor:
    """The gradient of scaled logits [rows, vocab]: (target - p) of the log-probability, -p (log p + H) of the
    entropy."""
    gradient = (log_probs + entropies.unsqueeze(1)).mul_(-of_entropy.unsqueeze(1)).sub_(of_chosen.unsqueeze(1))
    gradient *= log_probs.exp()
    return gradient.scatter_add_(1, targets.unsqueeze(1), of_chosen.unsqueeze(1))
