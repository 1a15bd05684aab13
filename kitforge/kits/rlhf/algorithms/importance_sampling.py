"""Tokens drawn from another distribution than the one that is trained: truncated and masked importance weights.

That happens where rollouts come from an older policy or another number format (Yao et al., 2025). B sequences, T
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.config import check
from kitforge.kits.rlhf.algorithms.kl import clamped_exp
from kitforge.kits.rlhf.algorithms.losses import masked_sequence_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSamplingOptions:
    """What is done about it."""

    mode: Literal["none", "truncate", "mask"] = "none"  # hold the ratio within the bounds, or leave the token out
    # A ratio for each token, or for all of a sequence: the product of its ratios, or their geometric mean, which is the
    # product normalised by length and stays near 1 over hundreds of tokens.
    level: Literal["token", "sequence", "geometric"] = "token"
    min: float = 0.0
    max: float = 2.0

    def __post_init__(self) -> None:
        check(0 <= self.min <= 1, "importance_sampling.min", self.min, "at least 0, at most 1")
        check(self.max >= 1, "importance_sampling.max", self.max, "a number of at least 1")


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, options: ImportanceSamplingOptions
) -> Tensor | None:
    """Weights [B, T] for the loss of each token, without a gradient; None where nothing is corrected.

    `old` are the trainer's log-probabilities before the first update, `behaviour` those that the tokens were drawn
    with.
    """
    if options.mode == "none":
        return None
    difference = torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()
    if options.level == "sequence":
        difference = difference.sum(-1, keepdim=True).expand_as(mask)
    elif options.level == "geometric":
        difference = masked_sequence_mean(difference, mask)
    ratio = clamped_exp(difference)
    if options.mode == "truncate":
        return ratio.clamp(options.min, options.max)
    return torch.where((ratio >= options.min) & (ratio <= options.max), ratio, 0.0)
