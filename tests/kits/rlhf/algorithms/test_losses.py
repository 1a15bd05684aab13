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


def test_before_the_first_update_the_gradient_is_that_of_reinforce() -> None:
    log_probs, gains = numbers(0, outside=0.0).requires_grad_(), numbers(1, outside=0.0)
    loss, is_clipped = policy_loss(log_probs, log_probs.detach(), gains, PLAIN)
    (found,) = torch.autograd.grad(aggregate(loss, MASK, "token-mean", 1.0), log_probs)
    (wanted,) = torch.autograd.grad(-(torch.where(MASK, gains, 0.0) * log_probs).sum(), log_probs)
    assert torch.allclose(found, wanted, atol=1e-12, rtol=0)
    assert not is_clipped.any()


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


def test_a_clipped_value_is_never_judged_better() -> None:
    values, old, wanted = numbers(2) * 3, numbers(3), numbers(4)
    free, _ = value_loss(values, old, wanted, None)
    held, is_clipped = value_loss(values, old, wanted, 0.2)
    assert bool((held >= free)[MASK].all())
    assert bool(is_clipped.any())
    assert torch.equal(free[MASK], ((values - wanted).square() / 2)[MASK])


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


def test_cispo_weighs_the_gradient_of_every_token_by_its_clipped_ratio() -> None:
    # MiniMax-M1 (2025), equations 4 and 5: sg(clip(r, 1 - low, 1 + high)) A log pi.
    log_probs, old, gains = numbers(0, outside=0.0), numbers(1, outside=0.0), numbers(2, outside=0.0)
    leaf, clip = log_probs.clone().requires_grad_(), ClipOptions(low=0.4, high=0.3)
    losses, is_clipped = cispo_loss(leaf, old, gains, clip)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    ratio = log_probs.exp() / old.exp()
    held = ratio.clamp(0.6, 1.3)
    assert torch.allclose(losses, -held * gains * log_probs, atol=1e-12, rtol=0)
    assert torch.allclose(gradient, -held * gains, atol=1e-12, rtol=0)
    assert torch.equal(is_clipped[MASK], (held != ratio)[MASK]) and is_clipped[MASK].any()
    weighed, _ = cispo_loss(leaf, old, gains, clip, torch.full_like(old, 0.5))
    assert torch.equal(weighed, losses * 0.5)


@pytest.mark.parametrize("loss", [policy_loss, cispo_loss])
@pytest.mark.parametrize("moved", [-200.0, 200.0])
@pytest.mark.parametrize("gain", [-1.0, 1.0])
def test_a_log_ratio_of_any_size_has_a_finite_loss_and_gradient(loss: Any, moved: float, gain: float) -> None:
    log_probs = torch.tensor([moved], requires_grad=True)
    found, _ = loss(log_probs, torch.zeros(1), torch.tensor([gain]), PLAIN)
    (gradient,) = torch.autograd.grad(found.sum(), log_probs)
    assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


OLD = torch.tensor([[0.0, 1.0, -2.0, float("nan")]], dtype=torch.float64, requires_grad=True)
BEHAVIOUR = torch.zeros(1, 4, dtype=torch.float64)
IS_MASK = torch.tensor([[True, True, True, False]])


def truncated_weights(**options: object) -> list[float]:
    weights = importance_weights(OLD, BEHAVIOUR, IS_MASK, ImportanceSamplingOptions(**options))  # type: ignore[arg-type]
    assert weights is not None
    assert not weights.requires_grad
    return weights[0].tolist()


def test_truncated_ratios_stay_within_the_bounds() -> None:
    assert truncated_weights(mode="truncate", min=0.5, max=2.0) == [1.0, 2.0, 0.5, 1.0]


def test_masked_tokens_count_for_nothing() -> None:
    assert truncated_weights(mode="mask", min=0.5, max=2.0) == [1.0, 0.0, 0.0, 1.0]


def test_none_corrects_nothing() -> None:
    assert importance_weights(OLD, BEHAVIOUR, IS_MASK, ImportanceSamplingOptions()) is None


@pytest.mark.parametrize("wrong", [{"min": 1.5}, {"max": 0.9}])
def test_bounds_that_leave_one_out_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="importance_sampling"):
        ImportanceSamplingOptions(**wrong)  # type: ignore[arg-type]


MODES = get_args(LossAggregation)


def whole(values: Tensor, mask: Tensor, mode: LossAggregation) -> float:
    return float(aggregate(values, mask, mode, loss_denominator(mask, mode, longest=8)))


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_what_its_name_says(mode: LossAggregation) -> None:
    values = numbers(0)
    rows = [values[row, :length] for row, length in enumerate(LENGTHS)]
    wanted = {
        "token-mean": sum(row.sum() for row in rows) / sum(LENGTHS),
        "seq-mean-token-mean": sum(row.mean() for row in rows) / len(rows),
        "seq-mean-token-sum": sum(row.sum() for row in rows) / len(rows),
        "constant": sum(row.sum() for row in rows) / (len(rows) * 8),
    }
    assert whole(values, MASK, mode) == pytest.approx(float(wanted[mode]), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_share_one_denominator(mode: LossAggregation, size: int) -> None:
    values = numbers(1)
    denominator = sum(loss_denominator(part, mode, 8) for part in MASK.split(size))
    pairs = zip(values.split(size), MASK.split(size), strict=True)
    parts = sum(float(aggregate(part, mask, mode, denominator)) for part, mask in pairs)
    assert parts == pytest.approx(whole(values, MASK, mode), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_neither_the_order_nor_more_padding_matters(mode: LossAggregation) -> None:
    values, order = numbers(2), torch.tensor([2, 0, 3, 1])
    wider = torch.cat([values, torch.full((4, 5), float("inf"), dtype=torch.float64)], dim=1)
    wider_mask = torch.cat([MASK, torch.zeros(4, 5, dtype=torch.bool)], dim=1)
    assert whole(values[order], MASK[order], mode) == pytest.approx(whole(values, MASK, mode), abs=1e-12)
    assert whole(wider, wider_mask, mode) == pytest.approx(whole(values, MASK, mode), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_sequence_counts_for_nothing(mode: LossAggregation) -> None:
    values, mask = numbers(3), MASK.clone()
    mask[1] = False
    kept = torch.tensor([0, 2, 3])
    assert whole(values, mask, mode) == pytest.approx(whole(values[kept], MASK[kept], mode), abs=1e-12)


def test_a_mean_of_means_weighs_the_tokens_of_a_short_micro_batch_more() -> None:
    # 16 tokens as 10 and 6: the figures of the issue that many projects had (verl #4711 logged them so for months).
    values = torch.arange(16, dtype=torch.float64)
    mean_of_means = (values[:10].mean() + values[10:].mean()) / 2
    rows = torch.stack([values[:10], torch.cat([values[10:], torch.zeros(4, dtype=torch.float64)])])
    mask = torch.arange(10) < torch.tensor([[10], [6]])
    assert whole(rows, mask, "token-mean") == pytest.approx(float(values.mean()), abs=1e-12)
    assert abs(float(mean_of_means) - whole(rows, mask, "token-mean")) > 0.5


def test_long_responses_weigh_as_the_mode_says() -> None:
    mask = torch.arange(1000) < torch.tensor([[10], [1000]])

    def weights(mode: LossAggregation) -> list[float]:
        values = torch.zeros(2, 1000, dtype=torch.float64, requires_grad=True)
        aggregate(values, mask, mode, loss_denominator(mask, mode, 1000)).backward()
        assert values.grad is not None
        return [float(values.grad[0, 0]), float(values.grad[1, 0])]

    assert weights("seq-mean-token-mean") == pytest.approx([0.05, 0.0005])
    assert weights("token-mean") == pytest.approx([1 / 1010, 1 / 1010])
    assert weights("constant") == pytest.approx([0.0005, 0.0005])
