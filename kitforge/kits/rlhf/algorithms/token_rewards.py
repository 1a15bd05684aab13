"""What every generated token earns. B sequences, T tokens; `mask` [B, T] is true for what the policy generated."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Rewards [B, T]: minus the penalty of each token, plus the score.

    A score a sequence [B] is earned by its last generated token, once; scores a token [B, T] where they stand. Nothing
    is earned outside of the mask. `penalties` [B, T] is the coefficient times the divergence of each token.
    """
    rewards = torch.where(mask, -penalties, 0.0)
    if scores.dim() == 2:
        return rewards + torch.where(mask, scores, 0.0)
    return rewards + torch.where(last_token_mask(mask), scores.unsqueeze(-1), 0.0)


def last_token_mask(mask: Tensor) -> Tensor:
    """True [B, T] at the last true place of each row; nowhere in a row without one."""
    remaining = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (remaining == 1)


def missing_eos_scores(scores: Tensor, is_finished: Tensor, penalty: float) -> Tensor:
    """Scores [B], less by `penalty` where the text did not come to its end."""
    return torch.where(is_finished, scores, scores - penalty)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Between 0 and 1 for responses of these lengths [B]: rises over the last `soft` tokens before `longest` (soft
    overlong punishment of DAPO; Yu et al., 2025)."""
    if buffer == 0:
        return (lengths > max_length).to(torch.float32)
    return ((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)
