from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError
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
from tests.kits.rlhf.algorithms.sequences import LENGTHS, MASK, numbers

PLAIN = ClipOptions()


@pytest.mark.parametrize(
    ("gain", "moved", "wanted"), [(1.0, 0.5, -1.2), (-1.0, -0.5, 0.8), (1.0, -0.5, None), (-1.0, 0.5, None)]
)
def test_only_a_move_that_already_went_too_far_is_held(gain: float, moved: float, wanted: float | None) -> None:
    log_probs = torch.tensor([moved], dtype=torch.float64, requires_grad=True)
    loss, is_clipped = policy_loss(log_probs, torch.zeros(1), torch.tensor([gain], dtype=torch.float64), PLAIN)
    free = -gain * log_probs.exp().item()
    assert loss.item() == pytest.approx(free if wanted is None else wanted)
    assert bool(is_clipped) == (wanted is not None)
    loss.backward()
    assert (log_probs.grad.item() == 0) == (wanted is not None)  # type: ignore[arg-type]


def test_the_dual_clip_bounds_what_a_bad_token_costs() -> None:
    log_probs = torch.tensor([4.0, 0.1], dtype=torch.float64, requires_grad=True)
    loss, is_clipped = policy_loss(log_probs, torch.zeros(2), torch.tensor([-2.0, -2.0]), ClipOptions(dual=3.0))
    assert loss.tolist() == pytest.approx([6.0, 2.0 * float(torch.tensor(0.1).exp())], rel=1e-6)
    assert is_clipped.tolist() == [True, False]
    loss.sum().backward()
    assert log_probs.grad[0].item() == 0  # type: ignore[index]


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
        loss = policy_loss(kept[0], kept[1], kept[2], PLAIN)[0] + value_loss(kept[3], kept[1], kept[2], 0.2)[0]
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


@pytest.mark.parametrize("wrong", [{"low": 1.1}, {"low": -0.1}, {"high": -1.0}, {"dual": 1.0}])
def test_ranges_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="clip"):
        ClipOptions(**wrong)


def test_gspo_is_the_surrogate_of_the_length_normalized_ratio_of_a_sequence() -> None:
    # Zheng et al. (2025), equations 5 and 7: s = (pi(y) / old(y)) ** (1 / |y|); the mean over sequences of
    # min(s A, clip(s) A).
    log_probs, old = (numbers(seed, outside=0.0) / 50 for seed in (0, 1))
    gains, clip = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64), ClipOptions(low=0.003, high=0.004)
    leaf = log_probs.clone().requires_grad_()
    losses, is_clipped = policy_loss(leaf, old, gains.unsqueeze(-1).expand_as(leaf), clip, sequence_mask=MASK)
    found = aggregate(losses, MASK, "seq-mean-token-mean", len(LENGTHS))
    other, terms = log_probs.clone().requires_grad_(), []
    for row, length in enumerate(LENGTHS):
        ratio = (other[row, :length].exp().prod() / old[row, :length].exp().prod()) ** (1 / length)
        held = ratio.clamp(1 - clip.low, 1 + clip.high)
        terms.append(torch.minimum(ratio * gains[row], held * gains[row]))
        assert bool(is_clipped[row, :length].any()) == bool(is_clipped[row, :length].all())
        assert bool(is_clipped[row, 0]) == bool(held * gains[row] < ratio * gains[row])
    wanted = -torch.stack(terms).mean()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-12)
    assert torch.allclose(*torch.autograd.grad(found, leaf), *torch.autograd.grad(wanted, other), atol=1e-12, rtol=0)
    assert is_clipped[:, 0].any() and not is_clipped[:, 0].all()


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


@pytest.mark.parametrize("wrong", [{"min": 1.5}, {"max": 0.9}])
def test_bounds_that_leave_one_out_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="importance_sampling"):
        ImportanceSamplingOptions(**wrong)  # type: ignore[arg-type]


MODES = get_args(LossAggregation)


def whole(values: Tensor, mask: Tensor, mode: LossAggregation) -> float:
    return float(aggregate(values, mask, mode, loss_denominator(mask, mode, longest=8)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_share_one_denominator(mode: LossAggregation, size: int) -> None:
    values = numbers(1)
    denominator = sum(loss_denominator(part, mode, 8) for part in MASK.split(size))
    pairs = zip(values.split(size), MASK.split(size), strict=True)
    parts = sum(float(aggregate(part, mask, mode, denominator)) for part, mask in pairs)
    assert parts == pytest.approx(whole(values, MASK, mode), abs=1e-12)
