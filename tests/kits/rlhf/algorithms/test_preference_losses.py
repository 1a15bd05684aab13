"""Losses of pairs at the ends of their ranges; what they are is drawn in tests/differential."""

import pytest
import torch

from kitforge.kits.rlhf.algorithms.preference_losses import orpo_loss


@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.69314718, -50.0])
def test_orpo_stays_finite_from_certainty_to_impossibility(log_prob: float) -> None:
    chosen, rejected = (torch.tensor([each], dtype=torch.float64, requires_grad=True) for each in (log_prob, -1.0))
    loss = orpo_loss(chosen, rejected)
    gradients = torch.autograd.grad(loss.sum(), [chosen, rejected])
    assert all(torch.isfinite(each).all() for each in (loss, *gradients))
    assert gradients[0].item() < 0 < gradients[1].item()
