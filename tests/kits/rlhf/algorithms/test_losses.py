from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.losses import (
    ClipOptions,
    ImportanceSamplingOptions,
    LossAggregation,
    aggregate,
    cispo_loss,
    explained_variance,
    importance_weights,
    loss_denominator,
    mask_fill,
    policy_loss,
    value_loss,
)
from kitforge.kits.rlhf.algorithms.preference_losses import orpo_loss
from tests.kits.rlhf.algorithms.sequences import MASK, numbers

PLAIN = ClipOptions()


def test_weights_scale_the_loss_and_have_no_gradient() -> None:
    weights = torch.tensor([0.5], requires_grad=True)
    log_probs = torch.zeros(1, requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.zeros(1), torch.ones(1), PLAIN, weights)
    loss.sum().backward()
    assert log_probs.grad.item() == -0.5  # type: ignore[arg-type]
    assert weights.grad is None


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -1e300])
def test_rubbish_outside_of_the_mask_changes_neither_loss_nor_gradient(rubbish: float) -> None:
    def run(outside: float) -> tuple[float, Tensor]:
        log_probs, old, gains, values = (numbers(seed, outside=outside) for seed in range(4))
        leaves = [log_probs.requires_grad_(), values.requires_grad_()]
        kept = mask_fill(MASK, log_probs, old, gains, values)
        loss = policy_loss(kept[0], kept[1], kept[2], PLAIN)[0] + value_loss(kept[3], kept[1], kept[2], 0.2)
        total = aggregate(loss, MASK, "token-mean", 17.0)
        return total.item(), torch.stack(torch.autograd.grad(total, leaves))

    (loss, gradients), (wanted, wanted_gradients) = run(rubbish), run(0.0)
    assert loss == wanted
    assert torch.equal(gradients, wanted_gradients)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_mute_one() -> None:
    wanted = numbers(5)
    assert float(explained_variance(wanted, wanted, MASK)) == 1.0
    assert float(explained_variance(torch.zeros_like(wanted), wanted, MASK)) == pytest.approx(0.0, abs=1e-12)
    assert float(explained_variance(wanted, torch.ones_like(wanted), MASK)) == 0.0


@pytest.mark.parametrize("loss", [policy_loss, cispo_loss])
@pytest.mark.parametrize("moved", [-200.0, 200.0])
@pytest.mark.parametrize("gain", [-1.0, 1.0])
def test_a_log_ratio_of_any_size_has_a_finite_loss_and_gradient(loss: Any, moved: float, gain: float) -> None:
    log_probs = torch.tensor([moved], requires_grad=True)
    found, _ = loss(log_probs, torch.zeros(1), torch.tensor([gain]), PLAIN)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


def test_none_corrects_nothing() -> None:
    assert importance_weights(numbers(0), numbers(1), MASK, ImportanceSamplingOptions()) is None


@pytest.mark.parametrize("mode", get_args(LossAggregation))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_share_one_denominator(mode: LossAggregation, size: int) -> None:
    values = numbers(1)
    denominator = sum(loss_denominator(part, mode, 8) for part in MASK.split(size))
    pairs = zip(values.split(size), MASK.split(size), strict=True)
    parts = sum(float(aggregate(part, mask, mode, denominator)) for part, mask in pairs)
    assert parts == pytest.approx(float(aggregate(values, MASK, mode, loss_denominator(MASK, mode, 8))), abs=1e-12)


@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -0.69314718, -50.0])
def test_orpo_stays_finite_from_certainty_to_impossibility(log_prob: float) -> None:
    chosen, rejected = (torch.tensor([each], dtype=torch.float64, requires_grad=True) for each in (log_prob, -1.0))
    loss = orpo_loss(chosen, rejected)
    gradients = torch.autograd.grad(loss.sum(), [chosen, rejected])
    assert all(torch.isfinite(each).all() for each in (loss, *gradients))
    assert gradients[0].item() < 0 < gradients[1].item()
