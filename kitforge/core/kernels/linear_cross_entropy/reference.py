"""The definition of `linear_cross_entropy`."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard, exact_logits
from kitforge.foundation.types import IGNORED


class LinearCrossEntropyKernel(Protocol):
    """Cross entropy of `hidden [rows, dim] @ weight [vocab, dim].T` against targets [rows], in fp32, summed over the
    rows whose target is not IGNORED, -100. Returns a 0-dim sum.

    With a `shard` of the vocabulary, which the reference does not take, the loss is global on every rank, and the
    gradient of `hidden` is the partial sum of this shard.
    """

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, *, shard: VocabularyShard | None = None
    ) -> Tensor: ...


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, shard: VocabularyShard | None = None
) -> Tensor:
    logits = exact_logits(hidden, weight, shard)
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none").sum()
