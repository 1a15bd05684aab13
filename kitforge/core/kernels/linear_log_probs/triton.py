"""`linear_log_probs` in chunks of rows, by the kernels of `triton.logits`. The backward pass recomputes the logits.

A target outside of the vocabulary gets the log-prob -inf: naming it would need a synchronization.
"""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import product_operands
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, add_product, chunks, merge_statistics
from kitforge.core.kernels.triton.logits import gradient_, statistics


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Chunked.apply(hidden, weight, targets, temperature, shard)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, shard: VocabularyShard | None
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, weight = product_operands(hidden, weight)
        columns = targets if shard is None else targets - shard.first
        exact = torch.promote_types(hidden.dtype, torch.float32)
        own = torch.empty(4, len(hidden), dtype=exact, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), len(weight), hidden.dtype, hidden.device):
                own[:, part] = statistics(hidden[part] @ weight.t(), columns[part], temperature)
        log_probs, entropies, normalizers = merge_statistics(own[None] if shard is None else shard.gather(own))
        ctx.save_for_backward(hidden, weight, columns, entropies, normalizers)
        ctx.temperature = temperature
        return log_probs, entropies

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, entropies, normalizers = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden, dtype=ctx.dtypes[0]) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=entropies.dtype) if wants_weight else None
        numbers = torch.stack([grad_log_probs, grad_entropies, entropies, normalizers])
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), len(weight), hidden.dtype, hidden.device):
                logits = hidden[part] @ weight.t()
                gradient_(logits, columns[part], numbers[:, part], ctx.temperature)
                if grad_hidden is not None:
                    grad_hidden[part] = logits @ weight
                if grad_weight is not None:
                    add_product(grad_weight, logits, hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.dtypes[1]), *(None,) * 3
