"""What policy and critic are trained on: a loss for every token [B, T], to be handed to `aggregate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.config import check
from kitforge.kits.rlhf.algorithms.kl import clamped_exp

# ppo: the clipped surrogate, with a ratio for each token. gspo: the same, with the length-normalised ratio of the whole
# sequence (Zheng et al., 2025). cispo: REINFORCE, weighted by the clipped ratio without a gradient (MiniMax, 2025).
LossMode = Literal["ppo", "gspo", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """How far one update may move a token's probability."""

    low: float = 0.2  # the ratio counts down to 1 - low; 1: there is no lower bound, as CISPO wants it
    high: float = 0.2  # and up to 1 + high; more than low keeps entropy up (DAPO)
    dual: float | None = None  # at negative advantages the loss ends at dual * |advantage| (Ye et al., 2020)

    def __post_init__(self) -> None:
        check(0 <= self.low <= 1, "rl.clip_ratio_low", self.low, "at least 0, at most 1")
        check(self.high >= 0, "rl.clip_ratio_high", self.high, "a number of at least 0")
        check(self.dual is None or self.dual > 1, "rl.dual_clip", self.dual, "a number above 1, or null")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip: ClipOptions,
    weights: Tensor | None = None,
    sequence_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO (Schulman et al., 2017) for every token, and where a clip decided it, both [B, T].

    `old` are the log-probabilities before the first update of the step; `weights` corrects for the distribution that
    the tokens were really drawn from, and has no gradient. Log-ratios are clamped at +-20. With `sequences`, the mask
    [B, T] of generated tokens, each token has the ratio of its whole sequence, see `length_normalised` (GSPO).
    """
    difference = logprobs - old_logprobs
    ratio = clamped_exp(difference if sequence_mask is None else masked_sequence_mean(difference, sequence_mask))
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss, is_clipped = torch.maximum(free, held), held > free
    if clip.dual is not None:
        bound = -advantages * clip.dual
        is_bound = (advantages < 0) & (loss > bound)
        loss, is_clipped = torch.where(is_bound, bound, loss), is_clipped | is_bound
    return (loss if weights is None else loss * weights.detach()), is_clipped


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: ClipOptions, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, 2025) for every token: minus the clipped ratio, without a gradient, times advantage and
    log-probability; and where the ratio was clipped, both [B, T]. No token loses its gradient to the clip."""
    ratio = clamped_exp(logprobs - old_logprobs).detach()
    held = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -held * advantages * logprobs
    return (loss if weights is None else loss * weights.detach()), held != ratio


def masked_sequence_mean(differences: Tensor, mask: Tensor) -> Tensor:
    """The mean over the true tokens of each sequence, at each of its places [B, T]; 0 for one without a token. Of
    log-ratios it is the log of their geometric mean, which does not grow with the length as their product does."""
    total = torch.where(mask, differences, 0.0).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(differences)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error for every token, and where the clip decided it, both [B, T]. With `clip` a value that has
    moved further than that from `old` is judged where it may be, if that is worse."""
    free = (values - returns).square()
    if clip_range is None:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    held = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square()
    return torch.maximum(free, held) / 2, held > free


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the true tokens; 0 where the returns do not vary."""
    target, error = returns[mask], (returns - values)[mask]
    if target.numel() < 2 or float(target.var()) == 0.0:
        return torch.zeros((), dtype=values.dtype)
    return 1 - error.var() / target.var()
