"""How much better each token was than what the critic expected (Schulman et al., 2016). B sequences, T tokens.

Tokens outside of the mask (padding, what a tool said between two turns) are no actions: the step goes from one
generated token to the next one, however far away.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: Tensor | float) -> Tensor:
    """Generalised advantage estimates [B, T], 0 outside of the mask.

    `discount` is gamma; `trace` is lambda, one number or one a sequence [B, 1]. The value after the last generated
    token is 0. Computed in ceil(log2 T) passes over whole tensors.
    """
    order = actions_first(mask)
    is_action = mask.gather(-1, order)
    rewards, own = (torch.where(is_action, each.gather(-1, order), 0.0) for each in (rewards, values))
    following = torch.cat([own[:, 1:], torch.zeros_like(own[:, :1])], dim=-1)
    errors = rewards + gamma * following - own
    found = torch.where(is_action, discounted_sums(errors, gamma * gae_lambda), 0.0)
    return torch.zeros_like(found).scatter(-1, order, found)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The discounted sums [B, T] of all rewards from each generated token on, 0 outside of the mask."""
    nothing = torch.zeros_like(rewards)
    return gae_advantages(rewards, nothing, mask, gamma, 1.0)


def actions_first(mask: Tensor) -> Tensor:
    """The places [B, T] of each row, true ones first, both kinds in their order."""
    return mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)


def discounted_sums(values: Tensor, rate: Tensor | float) -> Tensor:
    """s[t] = values[t] + rate * s[t + 1] along the last dim, by doubling: after pass k a sum spans 2^k tokens."""
    span, weight, length = 1, rate, values.shape[-1]
    while span < length:
        reached = torch.zeros_like(values)
        reached[..., : length - span] = values[..., span:]
        values = values + weight * reached
        span, weight = 2 * span, weight * weight
    return values


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha * length) a sequence [B, 1], so that a long response is not forgotten (VAPO; Yue et al.,
    2025)."""
    lengths = mask.sum(-1, keepdim=True).clamp(min=1).double()
    return (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)
