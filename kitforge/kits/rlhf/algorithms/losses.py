"""Losses of policy and critic per token [B, T], importance weights, and loss aggregation."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.config import check
from kitforge.kits.rlhf.algorithms.kl import clamped_exp

# ppo: the clipped surrogate, with a ratio for each token. gspo: the same, with the length-normalized ratio of the whole
# sequence (Zheng et al., 2025). cispo: REINFORCE, weighted by the clipped ratio without a gradient (MiniMax, 2025).
LossMode = Literal["ppo", "gspo", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """The clip range of the ratio."""

    low: float = 0.2  # clipped at 1 - low; 1: no lower bound (CISPO)
    high: float = 0.2  # clipped at 1 + high
    dual: float | None = None  # dual clip for negative advantages (Ye et al., 2020)

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
    """The clipped surrogate of PPO (Schulman et al., 2017) for every token, and where a clip was active, both [B, T].

    `old_logprobs` are those before the first update; `weights` are importance weights. Log-ratios are clamped
    at +-20. With `sequence_mask` [B, T], each token has the ratio of its sequence, see `masked_sequence_mean`
    (GSPO).
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
    """The mean over the tokens of each sequence in the mask, expanded to [B, T]; 0 for a sequence without tokens. For
    log-ratios it is the log of the geometric mean of the ratios, which does not grow with the length."""
    total = torch.where(mask, differences, 0.0).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(differences)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float | None) -> Tensor:
    """Half the squared error for every token [B, T]. With `clip_range` the larger of the unclipped and the clipped
    error counts, as in PPO."""
    free = (values - returns).square()
    if clip_range is None:
        return free / 2
    held = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square()
    return torch.maximum(free, held) / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the tokens in the mask; 0 for constant returns."""
    target, error = returns[mask], (returns - values)[mask]
    if target.numel() < 2 or float(target.var()) == 0.0:
        return torch.zeros((), dtype=values.dtype)
    return 1 - error.var() / target.var()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSamplingOptions:
    """Importance sampling for tokens of an older policy or of another precision (Yao et al., 2025)."""

    mode: Literal["none", "truncate", "mask"] = "none"  # clamp the ratio to [min, max], or drop the token
    # One ratio per token or per sequence: the product of the token ratios, or their geometric mean, which does not grow
    # with the length.
    level: Literal["token", "sequence", "geometric"] = "token"
    min: float = 0.0  # lower bound of the ratio
    max: float = 2.0  # upper bound of the ratio

    def __post_init__(self) -> None:
        check(0 <= self.min <= 1, "importance_sampling.min", self.min, "at least 0, at most 1")
        check(self.max >= 1, "importance_sampling.max", self.max, "a number of at least 1")


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, options: ImportanceSamplingOptions
) -> Tensor | None:
    """Importance weights [B, T] of the token losses, without a gradient; None with mode none.

    `old_logprobs` are the trainer's before the first update, `rollout_logprobs` the rollout engine's.
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


# The weight of a token in the loss of a step:
#   token-mean           1 / all tokens
#   seq-mean-token-mean  1 / (its sequence's tokens x all sequences)
#   seq-mean-token-sum   1 / all sequences
#   constant             1 / (longest completion allowed x all sequences), as in Dr. GRPO (Liu et al., 2025)
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def aggregate(values: Tensor, mask: Tensor, mode: LossAggregation, denominator: Tensor | float) -> Tensor:
    """The sum of `values` [B, T] over `mask` [B, T], weighted by `mode` and divided by `denominator`.

    The denominator is that of the whole step (`loss_denominator`, summed over micro-batches and ranks), so that the
    weight of a token does not depend on them. Values outside of the mask are ignored, NaN included.
    """
    kept = torch.where(mask, values, 0.0)
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / denominator
    return kept.sum() / denominator


def loss_denominator(mask: Tensor, mode: LossAggregation, longest: int) -> Tensor:
    """The contribution of these sequences [B, T] to the loss denominator of the step, a 0-dim tensor. `longest` is the
    maximum completion length. A sequence without tokens does not count."""
    if mode == "token-mean":
        return mask.sum()
    return mask.any(-1).sum() * (longest if mode == "constant" else 1)


def mask_fill(mask: Tensor, *values: Tensor) -> list[Tensor]:
    """The values with 0 outside of the mask. Apply it before differentiated arithmetic: masking afterwards gives the
    gradient 0 x NaN = NaN."""
    return [torch.where(mask, each, 0.0) for each in values]
