"""`linear_log_probs` in chunks of rows. The log-probabilities of all tokens are kept for the backward pass while they
are few; of more, each chunk is computed again there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.half import compute_dtype, storage_dtype

# Bytes of logits computed at once, and of those that are kept from the forward to the backward pass.
CHUNK_BYTES = 32 * 2**20
KEPT_BYTES = 256 * 2**20


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `dispatch.LinearLogProbs`."""
    found: tuple[Tensor, Tensor] = _Chunked.apply(hidden, weight, targets, temperature, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return found


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


def _log_probs(rows: Tensor, matrix: Tensor, temperature: float, exact: torch.dtype) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        logits = (rows @ matrix.t()).to(exact)
    return logits.div_(temperature).log_softmax(-1)


def _entropies(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _of_logits(log_probs: Tensor, targets: Tensor, entropies: Tensor, of_chosen: Tensor, of_entropy: Tensor) -> Tensor:
    """The gradient of scaled logits [rows, vocab]: (target - p) of the log-probability, -p (log p + H) of the
    entropy."""
    gradient = (log_probs + entropies.unsqueeze(1)).mul_(-of_entropy.unsqueeze(1)).sub_(of_chosen.unsqueeze(1))
    gradient *= log_probs.exp()
    return gradient.scatter_add_(1, targets.unsqueeze(1), of_chosen.unsqueeze(1))
