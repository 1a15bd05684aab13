"""Problems so small that the best policy is known: reference * exp(score / beta), up to a constant.

Two tokens out of three each are nine texts; every mean over texts is taken in full, so nothing is left to chance.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.advantages import (
    Baseline,
    discounted_returns,
    gae_advantages,
    group_advantages,
    token_rewards,
)
from kitforge.kits.rlhf.algorithms.kl import KlEstimator, kl_estimate, kl_loss
from kitforge.kits.rlhf.algorithms.losses import ClipOptions, aggregate, policy_loss

VOCAB, BETA = 3, 0.5
TEXTS = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))  # [9, 2]
MASK = torch.ones_like(TEXTS, dtype=torch.bool)
_RANDOM = torch.Generator().manual_seed(5)
REFERENCE = torch.randn(1 + VOCAB, VOCAB, dtype=torch.float64, generator=_RANDOM)
SCORES = torch.randn(len(TEXTS), dtype=torch.float64, generator=_RANDOM)

# From log-probabilities now and before [9, 2], and the reference's, to what is minimised.
Objective = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_probs(table: Tensor) -> Tensor:
    """Of each token of each text [9, 2], for logits of the first token and of the second after each first [4, 3]."""
    logs = table.log_softmax(-1)
    return torch.stack([logs[0, TEXTS[:, 0]], logs[1 + TEXTS[:, 0], TEXTS[:, 1]]], dim=1)


def trained(objective: Objective, updates: int = 250) -> Tensor:
    """Probabilities [9] of the texts after training: new rollouts in each update, and two steps on each."""
    table, reference = REFERENCE.clone().requires_grad_(), log_probs(REFERENCE)
    optimizer = torch.optim.Adam([table], lr=0.05)
    for _ in range(updates):
        old = log_probs(table).detach()
        for _ in range(2):
            optimizer.zero_grad()
            objective(log_probs(table), old, reference).backward()
            optimizer.step()
    return log_probs(table).detach().sum(-1).exp()


def best(scores: Tensor = SCORES) -> Tensor:
    """The closed form [9]."""
    return (log_probs(REFERENCE).sum(-1) + scores / BETA).softmax(-1)


def weighed(values: Tensor, old: Tensor) -> Tensor:
    """The mean over texts as the policy before wrote them."""
    return aggregate(values * old.sum(-1, keepdim=True).exp(), MASK, "seq-mean-token-sum", 1.0)


def penalised(estimator: KlEstimator, trace: float) -> Objective:
    """PPO: the divergence is taken from the rewards. The critic is perfect where the trace is below one."""

    def objective(now: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        rewards = token_rewards(SCORES, BETA * kl_estimate(old, reference, estimator), MASK)
        values = expected(discounted_returns(rewards, MASK, 1.0), old)
        gains = gae_advantages(rewards, values, MASK, 1.0, trace)
        return weighed(policy_loss(now, old, gains, ClipOptions())[0], old)

    return objective


def expected(came: Tensor, old: Tensor) -> Tensor:
    """What a perfect critic says before each token [9, 2]."""
    weights = old.sum(-1).exp()
    first = (weights * came[:, 0]).sum().expand(len(TEXTS))
    groups = TEXTS[:, :1] == TEXTS[:, 0]  # [9, 9]: texts that begin alike
    second = (groups * weights * came[:, 1]).sum(-1) / (groups * weights).sum(-1)
    return torch.stack([first, second], dim=1)


def compared(baseline: Baseline, estimator: KlEstimator) -> Objective:
    """The GRPO family: all groups of two, each with its probability; the divergence is a loss of its own."""

    def objective(now: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9))
        chances = old.sum(-1).exp()[pairs].prod(-1)
        gains = group_advantages(SCORES[pairs], baseline) * chances.unsqueeze(-1)
        gain = torch.zeros(9, dtype=torch.float64).index_add_(0, pairs.flatten(), gains.flatten()) / 2
        surrogate = aggregate(
            policy_loss(now, old, gain.unsqueeze(-1).expand_as(now), ClipOptions())[0], MASK, "seq-mean-token-sum", 1.0
        )
        return surrogate + BETA * weighed(kl_loss(now, reference, estimator, rollout_logprobs=old), old)

    return objective


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("trace", [1.0, 0.5])
def test_ppo_finds_the_best_policy(trace: float) -> None:
    assert distance(trained(penalised("k1", trace)), best()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_groups_find_the_best_policy_whichever_estimator_is_the_loss(estimator: KlEstimator) -> None:
    # Of a text's tokens only the sum has the divergence of texts as its mean; token by token it is the chain rule's.
    assert distance(trained(compared("rloo", estimator)), best()) < 0.02


@pytest.mark.slow
def test_a_mean_that_contains_the_response_itself_learns_from_less() -> None:
    # dr_grpo shrinks every advantage by (n - 1) / n, here to one half: that much less is a score worth.
    assert distance(trained(compared("dr_grpo", "k2")), best(SCORES / 2)) < 0.02
    assert distance(best(SCORES / 2), best()) > 0.05
