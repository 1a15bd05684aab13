"""What policy and critic are trained on: a loss for every token [B, T], to be handed to `aggregate`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """How far one update may move a token's probability."""

    low: float = 0.2  # the ratio counts down to 1 - low
    high: float = 0.2  # and up to 1 + high; more than low keeps entropy up (DAPO)
    dual: float | None = None  # at negative advantages the loss ends at dual * |advantage| (Ye et al., 2020)

    def __post_init__(self) -> None:
        check(0 <= self.low < 1, "clip.low", self.low, "at least 0, below 1")
        check(self.high >= 0, "clip.high", self.high, "a number of at least 0")
        check(self.dual is None or self.dual > 1, "clip.dual", self.dual, "a number above 1, or null")


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip: ClipOptions, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO (Schulman et al., 2017) for every token, and where a clip decided it, both [B, T].

    `old` are the log-probabilities before the first update of the step; `weights` corrects for the distribution that
    the tokens were really drawn from, and has no gradient.
    """
    ratio = (log_probs - old).exp()
    free = -advantages * ratio
    held = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss, is_clipped = torch.maximum(free, held), held > free
    if clip.dual is not None:
        bound = -advantages * clip.dual
        is_bound = (advantages < 0) & (loss > bound)
        loss, is_clipped = torch.where(is_bound, bound, loss), is_clipped | is_bound
    return (loss if weights is None else loss * weights.detach()), is_clipped


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half the squared error for every token, and where the clip decided it, both [B, T]. With `clip` a value that has
    moved further than that from `old` is judged where it may be, if that is worse."""
    free = (values - returns).square()
    if clip is None:
        return free / 2, torch.zeros_like(free, dtype=torch.bool)
    held = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.maximum(free, held) / 2, held > free


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the true tokens; 0 where the returns do not vary."""
    target, error = returns[mask], (returns - values)[mask]
    if target.numel() < 2 or float(target.var()) == 0.0:
        return torch.zeros((), dtype=values.dtype)
    return 1 - error.var() / target.var()
