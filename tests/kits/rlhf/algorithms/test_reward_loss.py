from __future__ import annotations

import math

import pytest
import torch

from kitforge.kits.rlhf.algorithms.reward_loss import pairwise_loss

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
