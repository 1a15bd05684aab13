"""Divergences of a student from its teacher over the whole vocabulary, in chunks of positions. N positions, V tokens.

KL(q || p), KL(p || q) and the generalized Jensen-Shannon divergence of GKD (Agarwal et al., 2024) of the student q and
the teacher p, both softmaxes over the ids of their tokenizer alone: networks pad their vocabularies differently.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.linear_cross_entropy.vocabulary import CHUNK_BYTES

# Fewer rows make a product slow, and each chunk adds up the gradient of the whole head.
LEAST_ROWS = 256
# The rows of the statistics of `linear_divergence`, which are not differentiated.
STATISTICS = ("reverse_kl", "forward_kl", "agreement", "entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Which divergence of which distributions."""

    beta: float  # 1: KL(q || p); 0: KL(p || q); between: beta KL(p || m) + (1 - beta) KL(q || m)
    temperature: float  # of both softmaxes, the one that completions were sampled at
    num_ids: int  # of the tokenizer; logits beyond are padding

    def of(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of logits [N, >= num_ids]: the divergences [N], their gradients by the student's logits [N, num_ids], and the
        statistics [4, N]."""
        log_q, log_p = (
            (each[:, : self.num_ids].to(torch.promote_types(each.dtype, torch.float32)) / self.temperature).log_softmax(
                -1
            )
            for each in (student, teacher)
        )
        q, p = log_q.exp(), log_p.exp()
        ratio = log_q - log_p
        reverse, forward = (q * ratio).sum(-1), -(p * ratio).sum(-1)
        is_same = log_q.argmax(-1) == log_p.argmax(-1)
        statistics = torch.stack([reverse, forward, is_same.to(reverse.dtype), -(q * log_q).sum(-1)])
        if self.beta == 0:
            return forward, (q - p) / self.temperature, statistics
        losses, scores = reverse, ratio
        if self.beta < 1:
            # m = beta p + (1 - beta) q; the gradient of the first term by q cancels the constant of the second.
            log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
            scores = (1 - self.beta) * (log_q - log_m)
            losses = self.beta * (p * (log_p - log_m)).sum(-1) + (q * scores).sum(-1)
        gradient = q * (scores - (q * scores).sum(-1, keepdim=True))
        return losses, gradient / self.temperature, statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What makes logits of hidden states; their vocabularies may be sharded, the logits are whole."""

    student: Callable[[Tensor], Tensor]  # [n, dim] -> [n, V], by the matrix that `linear_divergence` is given
    teacher: Callable[[Tensor], Tensor]  # [n, its dim] -> [n, its V]
    teacher_hidden: Tensor  # [N, its dim]


def linear_divergence(
    hidden: Tensor, weight: Tensor, row_weights: Tensor, heads: Heads, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """The sum of `row_weights` [N] times the divergences, and the `STATISTICS` [4, N], of hidden states [N, dim] under
    the student's head `weight` [V, dim]. One chunk of logits of both networks exists at a time."""
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    result: tuple[Tensor, Tensor] = _Chunked.apply(hidden, weight, row_weights, heads, divergence)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    """Gradients are computed in the forward pass, as in `linear_cross_entropy`: no logits are kept or made twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, row_weights: Tensor, heads: Heads, divergence: Divergence
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        needs = ctx.needs_input_grad[:2]
        sources = zip((hidden, weight), needs, strict=True)
        grads = [torch.zeros_like(each, dtype=exact) if is_needed else None for each, is_needed in sources]
        total = torch.zeros((), dtype=exact, device=hidden.device)
        statistics = torch.zeros(len(STATISTICS), len(hidden), dtype=exact, device=hidden.device)
        size = max(LEAST_ROWS, CHUNK_BYTES // (divergence.num_ids * exact.itemsize))
        # The range of fp16 is too small for gradients that are scaled only in the backward pass.
        is_exact = compute_dtype(hidden) is torch.float16
        with torch.autocast(hidden.device.type, enabled=False) if is_exact else nullcontext():
            for part in (slice(start, start + size) for start in range(0, len(hidden), size)):
                rows, others = (each[part].detach() for each in (hidden, heads.teacher_hidden))
                rows, others = (rows.to(exact), others.to(exact)) if is_exact else (rows, others)
                with torch.enable_grad():
                    logits = heads.student(rows.requires_grad_(needs[0]))
                losses, gradient, statistics[:, part] = divergence.of(logits.detach(), heads.teacher(others))
                total += (losses * row_weights[part]).sum()
                padded = torch.zeros_like(logits)
                padded[:, : divergence.num_ids] = gradient * row_weights[part].unsqueeze(1)
                _add_gradients(grads, logits, (rows, weight), padded, part)
        ctx.mark_non_differentiable(statistics)
        ctx.save_for_backward(*grads)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total, statistics

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if each is None else (each * grad).to(dtype) for each, dtype in pairs), *(None,) * 3


def _add_gradients(
    grads: list[Tensor | None], logits: Tensor, sources: tuple[Tensor, Tensor], gradient: Tensor, part: slice
) -> None:
    """Add those of a chunk of rows, and of the weight, by that of their logits."""
    wanted = [each for each, total in zip(sources, grads, strict=True) if total is not None]
    found = iter(torch.autograd.grad(logits, wanted, gradient) if wanted else ())
    for total, index in zip(grads, (part, slice(None)), strict=True):
        if total is not None:
            total[index] += next(found)
