"""Token rewards, advantages and returns. B sequences, T tokens; `mask` [B, T] is True for generated tokens."""

from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError


def token_rewards(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    """Token rewards [B, T]: the score minus the KL penalty of each token.

    A score per sequence [B] goes to its last generated token, scores per token [B, T] to their tokens. `penalties`
    [B, T] is the KL coefficient times the KL of each token. Rewards are 0 outside of the mask.
    """
    rewards = torch.where(mask, -penalties, 0.0)
    if scores.dim() == 2:
        return rewards + torch.where(mask, scores, 0.0)
    return rewards + torch.where(last_token_mask(mask), scores.unsqueeze(-1), 0.0)


def last_token_mask(mask: Tensor) -> Tensor:
    """True [B, T] at the last token of each row that is in the mask."""
    remaining = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (remaining == 1)


def missing_eos_scores(scores: Tensor, is_finished: Tensor, penalty: float) -> Tensor:
    """Scores [B] minus `penalty` for sequences without an EOS token."""
    return torch.where(is_finished, scores, scores - penalty)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Soft overlong punishment of DAPO (Yu et al., 2025) for completions of these lengths [B]: rises from 0 to 1 over
    the last `buffer` tokens before `max_length`."""
    if buffer == 0:
        return (lengths > max_length).to(torch.float32)
    return ((lengths - (max_length - buffer)) / buffer).clamp(0.0, 1.0)


def gae_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [B, T], 0 outside of the mask.

    The value after the last generated token is 0. The recursion skips tokens outside of the mask (padding, observations
    between turns). Computed in ceil(log2 T) passes.
    """
    # Generated tokens first, both kinds in their order.
    order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
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


def discounted_sums(values: Tensor, rate: float) -> Tensor:
    """s[t] = values[t] + rate * s[t + 1] along the last dim, by doubling: after pass k a sum spans 2^k tokens."""
    span, weight, length = 1, rate, values.shape[-1]
    while span < length:
        reached = torch.zeros_like(values)
        reached[..., : length - span] = values[..., span:]
        values = values + weight * reached
        span, weight = 2 * span, weight * weight
    return values


Baseline = Literal["grpo", "dr_grpo", "rloo"]
GROUP_EPSILON = 1e-6


def group_advantages(scores: Tensor, baseline: Baseline) -> Tensor:
    """Group-relative advantages [P, N] of N completions per prompt; exactly 0 in a group of equal scores, see
    `has_reward_variance`.

    grpo: (score - mean) / (std + 1e-6), std with n - 1 (Shao et al., 2024). dr_grpo: score - mean (Liu et al.,
    2025). rloo: score - mean of the others (Ahmadian et al., 2024). Raises ConfigError for groups of one.
    """
    size = scores.shape[-1]
    if size < 2:
        raise ConfigError(
            "group advantages need several completions per prompt",
            got=f"groups of {size}",
            expected="num_generations >= 2",
        )
    # The rounded mean of equal scores may differ from them.
    centred = torch.where(has_reward_variance(scores), scores - scores.mean(-1, keepdim=True), 0.0)
    if baseline == "grpo":
        return centred / (scores.std(-1, keepdim=True) + GROUP_EPSILON)
    return centred * (size / (size - 1)) if baseline == "rloo" else centred


# Rewards of a group that differ by less, relative to the largest, differ by the rounding of their sums.
REWARD_TOLERANCE = 1e-10


def has_reward_variance(scores: Tensor) -> Tensor:
    """Whether each group [P, 1] has scores that differ by more than rounding; dynamic sampling keeps those (DAPO; Yu et
    al., 2025)."""
    tolerance = max(REWARD_TOLERANCE, 4 * torch.finfo(scores.dtype).eps)
    largest, smallest = scores.amax(-1, keepdim=True), scores.amin(-1, keepdim=True)
    return largest - smallest > tolerance * torch.maximum(largest.abs(), smallest.abs())


WHITEN_EPSILON = 1e-8


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [B, T] with mean 0 and variance 1 (n - 1) over the true tokens, 0 elsewhere. Fewer than two tokens have
    no variance: they become 0."""
    kept = torch.where(mask, values, 0.0)
    count = mask.sum().to(values)
    centered = torch.where(mask, values - kept.sum() / count.clamp(min=1), 0.0)
    if count < 2:
        return centered
    return centered * torch.rsqrt(centered.square().sum() / (count - 1) + WHITEN_EPSILON)
