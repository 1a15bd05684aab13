"""The definition of `linear_cross_entropy`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.vocabulary import VocabularyShard, exact_logits, row_weights


class LinearCrossEntropyKernel(Protocol):
    """Cross entropy of `hidden [rows, dim] @ weight [vocab, dim].T` against targets [rows], in fp32, summed over the
    rows whose target is not -100. Returns a 0-dim sum.

    `token_weights` [rows], which get no gradient, multiply the losses. `softcap` c replaces each logit x by
    c tanh(x / c). With a `shard` of the vocabulary, which the reference does not take, the loss is global on every
    rank, and the gradient of `hidden` is the partial sum of this shard.
    """

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        token_weights: Tensor | None = None,
        softcap: float | None = None,
        shard: VocabularyShard | None = None,
    ) -> Tensor: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    token_weights: Tensor | None = None,
    softcap: float | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """See `LinearCrossEntropyKernel`."""
    logits = exact_logits(hidden, weight, softcap, shard)
    losses = functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    weights = row_weights(targets, token_weights, logits.dtype)
    # Not a product with zero in ignored rows: their losses may be NaN.
    return torch.where(weights == 0, 0, losses * weights).sum()
