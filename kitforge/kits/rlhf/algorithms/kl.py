"""KL(policy || reference): estimators from sampled tokens, KL losses, and the controller of the coefficient.

Schulman, "Approximating KL divergence" (2020). With d = log policy - log reference of a token drawn from the policy:
k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. k1 and k3 have the divergence as their mean, k2 nearly.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kitforge.foundation.config import check

KlEstimator = Literal["k1", "k2", "k3"]
# Log-ratios are clamped to this many nats before exp, so that no loss overflows and no gradient is infinity times zero.
MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The KL estimate of every token [B, T], detached, for metrics and reward penalties.

    Its gradient would be wrong: that of k1 has mean zero, that of k3 is the gradient of KL(reference || policy).
    """
    return _estimate((logprobs - ref_logprobs).detach(), estimator)


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, rollout_logprobs: Tensor | None = None
) -> Tensor:
    """The KL loss of every token [B, T]; with any estimator its mean gradient is that of KL(policy || reference).

    `rollout_logprobs` are those of the policy that generated the tokens; None: the current policy.
    """
    rollout_logprobs = logprobs.detach() if rollout_logprobs is None else rollout_logprobs.detach()
    weight = clamped_exp(logprobs - rollout_logprobs)
    # The mean of k1 and k3 is the divergence whatever the policy, so that the gradient of the weighted mean is its
    # gradient. k2's mean is another number, but d * grad log policy, its own gradient, has the right mean.
    weight = weight.detach() if estimator == "k2" else weight
    return weight * _estimate(logprobs - ref_logprobs.detach(), estimator)


def biased_kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The KL estimate of every token [B, T], differentiated directly. With k3 this is GRPO as published (Shao et al.,
    2024); its mean gradient is that of KL(reference || policy). The gradient of k1 has mean zero."""
    return _estimate(logprobs - ref_logprobs.detach(), estimator)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 nats; beyond that its gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _estimate(difference: Tensor, estimator: KlEstimator) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # k3 overflows for very negative differences only; for positive ones it is about `difference`.
    difference = difference.clamp(min=-MAX_LOG_RATIO)
    return (-difference).expm1() + difference


MAX_RELATIVE_ERROR = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControllerOptions:
    """The KL coefficient, fixed or adaptive."""

    controller: Literal["fixed", "adaptive"] = "fixed"  # KL controller
    coef: float = 0.05  # KL coefficient (beta); initial value of the adaptive controller
    target: float = 6.0  # target KL of the adaptive controller, in nats per sequence
    horizon: int = 10000  # horizon of the adaptive controller, in sequences

    def __post_init__(self) -> None:
        check(self.coef >= 0, "kl.coef", self.coef, "a number of at least 0")
        check(self.target > 0, "kl.target", self.target, "nats per sequence, above 0")
        check(self.horizon > 0, "kl.horizon", self.horizon, "a number of sequences of at least 1")


class KlController:
    """Holds the KL coefficient `coef`. The adaptive one is a proportional controller (Ziegler et al., 2019): every
    `horizon` sequences the coefficient changes by the relative error of the KL, clipped to 0.2."""

    def __init__(self, options: KlControllerOptions) -> None:
        self._options = options
        self.coef = options.coef

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Adapt the coefficient to the mean KL of a rollout batch, over all ranks."""
        if self._options.controller == "fixed":
            return
        error = min(max(kl_per_sequence / self._options.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        # More sequences than the horizon must not make the coefficient negative.
        self.coef *= max(1 + error * num_sequences / self._options.horizon, 0.0)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"coefficient": self.coef} if self._options.controller == "adaptive" else {}

    def load_state(self, state: dict[str, float]) -> None:
        """Inverse of `state`."""
        self.coef = state.get("coefficient", self.coef)
