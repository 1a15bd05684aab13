"""Values by hand, symmetries, and where each loss has its lowest point."""

import math

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.preference_losses import (
    dpo_loss,
    logratio_margin,
    orpo_loss,
    pairwise_loss,
)


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_a_policy_that_prefers_like_its_reference_is_at_chance() -> None:
    log_ratio = logratio_margin(number(-3.0), number(-7.0), number(-3.5), number(-7.5))
    assert dpo_loss(log_ratio, beta=0.1).item() == pytest.approx(math.log(2), abs=1e-12)


def test_swapping_the_pair_and_the_trust_in_it_changes_nothing() -> None:
    assert torch.allclose(dpo_loss(number(1.7), 0.3, 0.2), dpo_loss(number(-1.7), 0.3, 0.8), atol=1e-12, rtol=0)


def test_smoothed_labels_are_believed_up_to_their_odds() -> None:
    log_ratio = number(math.log(0.9 / 0.1) / 0.3).requires_grad_()
    (gradient,) = torch.autograd.grad(dpo_loss(log_ratio, 0.3, label_smoothing=0.1).sum(), log_ratio)
    assert abs(gradient.item()) < 1e-12


def test_orpo_compares_odds() -> None:
    def odds(log_prob: float) -> float:
        return math.exp(log_prob) / (1 - math.exp(log_prob))

    wanted = -math.log(sigmoid(math.log(odds(-0.3) / odds(-1.2))))
    assert orpo_loss(number(-0.3), number(-1.2)).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.69314718, -50.0])
def test_orpo_stays_finite_from_certainty_to_impossibility(log_prob: float) -> None:
    chosen, rejected = number(log_prob).requires_grad_(), number(-1.0).requires_grad_()
    loss = orpo_loss(chosen, rejected)
    gradients = torch.autograd.grad(loss.sum(), [chosen, rejected])
    assert all(torch.isfinite(each).all() for each in (loss, *gradients))
    assert gradients[0].item() < 0 < gradients[1].item()


CHOSEN = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
REJECTED = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)


def test_a_margin_asks_for_that_much_more() -> None:
    assert torch.equal(pairwise_loss(CHOSEN, REJECTED, margin=0.7), pairwise_loss(CHOSEN - 0.7, REJECTED))
    margins = torch.tensor([0.0, 1.0, 2.0])
    assert pairwise_loss(CHOSEN, CHOSEN, margin=margins).tolist() == pytest.approx(
        [math.log(1 + math.exp(margin)) for margin in margins.tolist()]
    )
