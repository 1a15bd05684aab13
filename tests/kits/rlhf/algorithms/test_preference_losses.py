"""Values by hand, symmetries, and where each loss has its lowest point."""

import math

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.preference_losses import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    logratio_margin,
    orpo_loss,
    pairwise_loss,
    rpo_loss,
    simpo_loss,
)


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_a_policy_that_prefers_like_its_reference_is_at_chance() -> None:
    log_ratio = logratio_margin(number(-3.0), number(-7.0), number(-3.5), number(-7.5))
    assert dpo_loss(log_ratio, beta=0.1).item() == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("log_ratio", [-40.0, -1.0, 0.3, 5.0])
def test_dpo_is_minus_the_log_of_the_probability_of_the_label(log_ratio: float) -> None:
    found = dpo_loss(number(log_ratio), beta=0.5).item()
    assert found == pytest.approx(-math.log(sigmoid(0.5 * log_ratio)), rel=1e-10)


def test_swapping_the_pair_and_the_trust_in_it_changes_nothing() -> None:
    assert torch.allclose(dpo_loss(number(1.7), 0.3, 0.2), dpo_loss(number(-1.7), 0.3, 0.8), atol=1e-12, rtol=0)


def test_smoothed_labels_are_believed_up_to_their_odds() -> None:
    log_ratio = number(math.log(0.9 / 0.1) / 0.3).requires_grad_()
    (gradient,) = torch.autograd.grad(dpo_loss(log_ratio, 0.3, label_smoothing=0.1).sum(), log_ratio)
    assert abs(gradient.item()) < 1e-12


def test_ipo_draws_the_ratio_to_one_over_two_beta() -> None:
    log_ratio = number(1 / (2 * 0.2)).requires_grad_()
    loss = ipo_loss(log_ratio, beta=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss.item() == 0
    assert gradient.item() == 0
    assert ipo_loss(number(0.0), beta=0.2).item() == pytest.approx(6.25)


def test_kto_judges_both_kinds_against_the_baseline() -> None:
    ratios, desirable = torch.tensor([2.0, 2.0], dtype=torch.float64), torch.tensor([True, False])
    found = kto_loss(ratios, desirable, number(0.5).squeeze(), beta=0.4).tolist()
    assert found == pytest.approx([1 - sigmoid(0.4 * 1.5), 1 - sigmoid(-0.4 * 1.5)], abs=1e-12)


def test_the_baseline_of_kto_is_never_below_zero_and_has_no_gradient() -> None:
    baseline = torch.tensor(-3.0, requires_grad=True)
    ratios = number(1.0).requires_grad_()
    loss = kto_loss(ratios, torch.tensor([True]), baseline, beta=1.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1 - sigmoid(1.0))
    assert baseline.grad is None


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


def test_simpo_asks_for_a_margin() -> None:
    assert simpo_loss(number(-1.0), number(-1.5), beta=2.0, gamma=1.0).item() == pytest.approx(math.log(2))
    assert simpo_loss(number(-1.0), number(-2.0), beta=2.0, gamma=0.5).item() == pytest.approx(-math.log(sigmoid(1.5)))


def test_rpo_adds_the_mean_loss_a_token_of_the_chosen_response() -> None:
    # Pang et al. (2024), equation 1: - alpha log pi(y) / |y| beside DPO.
    tokens = torch.tensor([0.5, 0.25, 0.8], dtype=torch.float64)
    found = rpo_loss(tokens.log().sum().unsqueeze(0), torch.tensor([3]))
    assert found.item() == pytest.approx(-math.log(0.5 * 0.25 * 0.8) / 3, abs=1e-12)


CHOSEN = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
REJECTED = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)


def test_equal_scores_are_at_chance() -> None:
    assert pairwise_loss(CHOSEN, CHOSEN).tolist() == pytest.approx([math.log(2)] * 3, abs=1e-12)


def test_gradients_of_a_pair_are_opposite() -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    up, down = torch.autograd.grad(pairwise_loss(chosen, rejected, margin=0.5).sum(), [chosen, rejected])
    assert torch.allclose(up, -down, atol=1e-12, rtol=0)
    assert bool((up < 0).all())


def test_a_constant_added_to_all_scores_matters_to_the_centre_alone() -> None:
    plain, shifted = pairwise_loss(CHOSEN, REJECTED), pairwise_loss(CHOSEN + 5, REJECTED + 5)
    assert torch.allclose(plain, shifted, atol=1e-12, rtol=0)
    centred = pairwise_loss(CHOSEN + 5, REJECTED + 5, center_coefficient=0.01) - shifted
    assert torch.allclose(centred, 0.01 * (CHOSEN + REJECTED + 10).square(), atol=1e-12, rtol=0)


def test_a_margin_asks_for_that_much_more() -> None:
    assert torch.equal(pairwise_loss(CHOSEN, REJECTED, margin=0.7), pairwise_loss(CHOSEN - 0.7, REJECTED))
    margins = torch.tensor([0.0, 1.0, 2.0])
    assert pairwise_loss(CHOSEN, CHOSEN, margin=margins).tolist() == pytest.approx(
        [math.log(1 + math.exp(margin)) for margin in margins.tolist()]
    )
