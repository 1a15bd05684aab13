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
from kitforge.kits.rlhf.algorithms.divergence import bounded_exp
from kitforge.kits.rlhf.algorithms.policy import length_normalised


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """What is done about it."""

    mode: Literal["none", "truncate", "mask"] = "none"  # hold the ratio within the bounds, or leave the token out
    # A ratio for each token, or for all of a sequence: the product of its ratios, or their geometric mean, which is the
    # product normalised by length and stays near 1 over hundreds of tokens.
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check(0 <= self.low <= 1, "correction.low", self.low, "at least 0, at most 1")
        check(self.high >= 1, "correction.high", self.high, "a number of at least 1")


def importance_weights(old: Tensor, behaviour: Tensor, mask: Tensor, options: CorrectionOptions) -> Tensor | None:
    """Weights [B, T] for the loss of each token, without a gradient; None where nothing is corrected.

    `old` are the trainer's log-probabilities before the first update, `behaviour` those that the tokens were drawn
    with.
    """
    if options.mode == "none":
        return None
    difference = torch.where(mask, old - behaviour, 0.0).detach()
    if options.level == "sequence":
        difference = difference.sum(-1, keepdim=True).expand_as(mask)
    elif options.level == "geometric":
        difference = length_normalised(difference, mask)
    ratio = bounded_exp(difference)
    if options.mode == "truncate":
        return ratio.clamp(options.low, options.high)
    return torch.where((ratio >= options.low) & (ratio <= options.high), ratio, 0.0)
