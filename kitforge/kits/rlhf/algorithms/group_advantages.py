"""Baselines from several responses to one prompt. Scores are [P, N]: P prompts, N responses each."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError

Baseline = Literal["grpo", "dr_grpo", "rloo"]
EPSILON = 1e-6


def group_advantages(scores: Tensor, baseline: Baseline) -> Tensor:
    """Advantages [P, N] of each response among those to its prompt; exactly 0 in a group of equal scores.

    grpo: (score - mean) / (deviation + 1e-6), with n - 1 (Shao et al., 2024). dr_grpo: score - mean (Liu et al.,
    2025). rloo: score - mean of the others (Ahmadian et al., 2024). Raises ConfigError for groups of one, which have
    nothing to compare.
    """
    size = scores.shape[-1]
    if size < 2:
        raise ConfigError(
            "a response cannot be compared with itself", got=f"groups of {size}", expected="num_generations >= 2"
        )
    # The mean of equal numbers need not be that number.
    centred = torch.where(has_reward_variance(scores), scores - scores.mean(-1, keepdim=True), 0.0)
    if baseline == "grpo":
        return centred / (scores.std(-1, keepdim=True) + EPSILON)
    return centred * (size / (size - 1)) if baseline == "rloo" else centred


def has_reward_variance(scores: Tensor) -> Tensor:
    """Whether a group [P, 1] holds different scores: what dynamic sampling keeps (DAPO; Yu et al., 2025)."""
    return scores.amax(-1, keepdim=True) != scores.amin(-1, keepdim=True)
