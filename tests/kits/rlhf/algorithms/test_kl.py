"""The estimators over all outcomes of a small distribution, where every mean is a finite sum."""

import json
from typing import get_args

import pytest
import torch

from kitforge.kits.rlhf.algorithms.kl import KlController, KlControllerOptions, KlEstimator, kl_estimate, kl_loss
from tests.kits.rlhf.algorithms.sequences import numbers

ESTIMATORS = get_args(KlEstimator)
OUTCOMES = torch.ones(7, dtype=torch.bool)
LOGITS, REFERENCE = numbers(0, OUTCOMES), numbers(1, OUTCOMES).log_softmax(-1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("is_older", [False, True])
def test_the_gradient_of_the_loss_is_that_of_the_divergence(estimator: KlEstimator, is_older: bool) -> None:
    """Also for tokens of an older policy."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    older = numbers(2, OUTCOMES).log_softmax(-1) if is_older else None
    drawn_by = log_probs.detach() if older is None else older
    loss = (drawn_by.exp() * kl_loss(log_probs, REFERENCE, estimator, rollout_logprobs=older)).sum()
    exact = (log_probs.exp() * (log_probs - REFERENCE)).sum()
    found, wanted = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, exact))
    assert torch.allclose(found, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_policy_that_is_its_reference_is_at_no_distance(estimator: KlEstimator) -> None:
    assert torch.equal(kl_estimate(REFERENCE, REFERENCE, estimator), torch.zeros_like(REFERENCE))
    assert not kl_estimate(LOGITS.clone().requires_grad_(), REFERENCE, estimator).requires_grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("away", [-200.0, 200.0])
def test_any_distance_has_a_finite_loss_and_gradient(estimator: KlEstimator, away: float) -> None:
    log_probs = torch.tensor([away], requires_grad=True)
    for old in (torch.zeros(1), torch.full((1,), 2 * away)):
        loss = kl_loss(log_probs, torch.zeros(1), estimator, rollout_logprobs=old)
        assert torch.isfinite(loss).all() and torch.isfinite(torch.autograd.grad(loss.sum(), log_probs)[0]).all()
    assert torch.isfinite(kl_estimate(log_probs, torch.zeros(1), estimator)).all()


ADAPTIVE = KlControllerOptions(controller="adaptive", coef=0.1, target=6.0, horizon=1000)


def test_a_fixed_one_never_moves() -> None:
    fixed = KlController(KlControllerOptions(coef=0.1))
    fixed.update(600.0, 100)
    assert fixed.coef == 0.1
    assert fixed.state() == {}


def test_it_goes_on_where_its_state_was_saved() -> None:
    went_on, resumed = KlController(ADAPTIVE), KlController(ADAPTIVE)
    went_on.update(9.0, 100)
    resumed.load_state(json.loads(json.dumps(went_on.state())))
    for each in (went_on, resumed):
        each.update(1.0, 64)
    assert resumed.coef == went_on.coef
