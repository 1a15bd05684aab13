"""`linear_cross_entropy` in chunks of rows, as in `chunked.py`, by the kernels of `triton.logits`: the logits of a
chunk become their gradient in place and in their own dtype, without an fp32 copy. The gradient of an fp32 weight is
never rounded, also under autocast.

A target outside of the vocabulary makes the loss infinite: naming it would need a synchronization.
"""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import product_operands
from kitforge.core.kernels.linear_cross_entropy.chunked import again
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, add_product, chunks, merge_statistics
from kitforge.core.kernels.triton.logits import gradient_, statistics
from kitforge.foundation.types import IGNORED


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, shard: VocabularyShard | None = None
) -> Tensor:
    result: Tensor = _Chunked.apply(hidden, weight, targets, torch.is_grad_enabled(), shard)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradients: bool, shard: VocabularyShard | None
    ) -> Tensor:
        wants_hidden, wants_weight = (with_gradients and wanted for wanted in ctx.needs_input_grad[:2])
        rounded, matrix = product_operands(hidden, weight)
        exact = torch.promote_types(rounded.dtype, torch.float32)
        # 1 in the rows that count, 0 in the others.
        counts = (targets != IGNORED).to(exact)
        columns, width = (targets, len(weight)) if shard is None else (targets - shard.first, shard.max_rows)
        losses = torch.zeros_like(counts)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), width, rounded.dtype, hidden.device):
                logits = rounded[part] @ matrix.t()
                own = statistics(logits, columns[part], 1.0)
                log_probs, entropies, normalizers = merge_statistics(own[None] if shard is None else shard.gather(own))
                losses[part] = log_probs
                if not wants_hidden and not wants_weight:
                    continue
                # The entropies get no gradient.
                numbers = torch.stack([-counts[part], torch.zeros_like(log_probs), entropies, normalizers])
                gradient_(logits, columns[part], numbers, 1.0)
                if grad_hidden is not None:
                    grad_hidden[part] = logits @ matrix
                if grad_weight is not None:
                    add_product(grad_weight, logits, rounded[part])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(hidden, weight, targets, grad_hidden, grad_weight)
        ctx.is_whole = shard is None
        return torch.where(counts == 0, 0, -losses).sum()

    @staticmethod
    @by_hand(again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The loss is used once in a step, so its gradients are scaled in place; torch refuses to unpack them again.
        return *(None if each is None else each.mul_(grad) for each in ctx.saved_tensors[3:]), *(None,) * 3
