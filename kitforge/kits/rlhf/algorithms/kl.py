"""How far a policy is from its reference: estimators of KL(policy || reference) from sampled tokens.

Schulman, "Approximating KL divergence" (2020). With d = log policy - log reference of a token drawn from the policy:
k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. k1 and k3 have the divergence as their mean, k2 nearly.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
# A log-ratio beyond this many nats is exponentiated as if it stood there, so that no loss overflows and no gradient is
# infinity times zero.
MAX_LOG_RATIO = 20.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for every token [B, T], to be looked at or to be subtracted from rewards.

    Not to be differentiated: the mean gradient of k1 is zero, that of k3 belongs to KL(reference || policy).
    """
    return _estimate((logprobs - ref_logprobs).detach(), estimator)


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator, rollout_logprobs: Tensor | None = None
) -> Tensor:
    """The estimate for every token [B, T] whose mean gradient is that of KL(policy || reference), whichever estimator.

    `drawn_from` are the log-probabilities of the tokens under the policy that drew them; None: the policy itself, as
    it is now.
    """
    rollout_logprobs = logprobs.detach() if rollout_logprobs is None else rollout_logprobs.detach()
    weight = clamped_exp(logprobs - rollout_logprobs)
    # The mean of k1 and k3 is the divergence whatever the policy, so that the gradient of the weighted mean is its
    # gradient. k2's mean is another number, but d * grad log policy, its own gradient, has the right mean.
    weight = weight.detach() if estimator == "k2" else weight
    return weight * _estimate(logprobs - ref_logprobs.detach(), estimator)


def biased_kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for every token [B, T], differentiated as it stands: with k3 that of GRPO as published (Shao et al.,
    2024), whose mean gradient is that of KL(reference || policy). That of k1 has mean zero."""
    return _estimate(logprobs - ref_logprobs.detach(), estimator)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """The ratio, of a log-ratio clamped at +-20 nats; there its gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _estimate(difference: Tensor, estimator: KlEstimator) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # Only this end overflows; at the other the estimate is nearly `difference`, and exact.
    difference = difference.clamp(min=-MAX_LOG_RATIO)
    return (-difference).expm1() + difference
