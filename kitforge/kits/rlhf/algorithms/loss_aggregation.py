"""From a value per token to one number. The only place that decides how tokens and sequences are weighed.

B sequences, T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# What a token weighs in the whole step:
#   token-mean           1 / all tokens
#   seq-mean-token-mean  1 / (its sequence's tokens x all sequences)
#   seq-mean-token-sum   1 / all sequences
#   constant             1 / (longest response allowed x all sequences), as in Dr. GRPO (Liu et al., 2025)
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def aggregate(values: Tensor, mask: Tensor, mode: LossAggregation, denominator: Tensor | float) -> Tensor:
    """The sum of `values` [B, T] where `mask` [B, T] is true, weighed as `mode` says, over `denominator`.

    The denominator is that of the whole step (`share_of_denominator`, added up over micro-batches and ranks), so that
    neither a micro-batch nor a rank weighs its tokens by its own count. What stands outside of the mask is never read
    into the sum, whatever it is.
    """
    kept = torch.where(mask, values, 0.0)
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / denominator
    return kept.sum() / denominator


def loss_denominator(mask: Tensor, mode: LossAggregation, longest: int) -> Tensor:
    """What these sequences [B, T] add to the denominator of the step, a 0-dim tensor. `longest` is the number of
    tokens that a response may have. A sequence without a token counts for nothing."""
    if mode == "token-mean":
        return mask.sum()
    return mask.any(-1).sum() * (longest if mode == "constant" else 1)


def mask_fill(mask: Tensor, *values: Tensor) -> list[Tensor]:
    """The values with 0 outside of the mask. To be done before arithmetic that is differentiated: what is masked only
    afterwards still has a gradient of 0 x NaN."""
    return [torch.where(mask, each, 0.0) for each in values]
