"""The definition of `linear_log_probs`."""

from typing import Protocol

from torch import Tensor

from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, exact_logits


class LinearLogProbsKernel(Protocol):
    """Log-probs of targets [rows] under the softmax of `hidden [rows, dim] @ weight [vocab, dim].T / temperature`, and
    the entropies of those distributions: both [rows], in fp32 and differentiable.

    `shard` is that of `LinearCrossEntropyKernel`.
    """

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        *,
        shard: VocabularyShard | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    log_probs = (exact_logits(hidden, weight, shard) / temperature).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies
