"""Losses and advantages of alignment on drawn numbers: the formulas of the papers in float64, token by token, and their
slopes as differences of these.

TRL 1.16's own `odds_ratio_loss` and `cpo_loss` gave the numbers of ours on 3000 drawn batches, run by hand: SimPO, and
DPO and IPO without a reference, to the last digits, ORPO to 7e-7, where theirs rounds. Its other losses are lines of
its trainers, see `tests/kits/rlhf/algorithms/test_trl.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from torch import Tensor

from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms import advantages as ours
from kitforge.kits.rlhf.algorithms import losses
from kitforge.kits.rlhf.algorithms import preference_losses as pairs
from kitforge.kits.rlhf.algorithms.kl import KlController, KlControllerOptions, biased_kl_loss, kl_estimate, kl_loss
from kitforge.kits.rlhf.config import PreferenceLossOptions
from tests.differential.drawn import drawn

Numbers = NDArray[np.float64]
# Losses of pairs that TRL has and we do not.
REFUSED = {
    "aot": "alignment by optimal transport",
    "aot_unpaired": "alignment by optimal transport",
    "apo_down": "anchored preferences",
    "apo_zero": "anchored preferences",
    "bco_pair": "a classifier of single answers",
    "discopop": "a loss that a search found",
    "exo_pair": "the divergence the other way round",
    "hinge": "a margin (SLiC)",
    "nca_pair": "contrast with noise",
    "robust": "labels that are wrong at a known rate",
    "sft": "the task sft",
    "sigmoid_norm": "DPO of means over tokens",
    "sppo_hard": "self-play",
}
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 7))
RATIOS = st.floats(-15, 15)


def grid(data: st.DataObject, shape: tuple[int, ...], elements: st.SearchStrategy[float] = RATIOS) -> Numbers:
    found: Numbers = data.draw(arrays.arrays(np.float64, shape, elements=elements))
    return found


def masks(data: st.DataObject, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Generated tokens, with observations between them, and sequences of none."""
    found: NDArray[np.bool_] = data.draw(arrays.arrays(np.bool_, shape))
    return found


def hidden(values: Numbers, mask: NDArray[np.bool_]) -> Tensor:
    """The values, with NaN where nothing may read them."""
    return torch.from_numpy(np.where(mask, values, math.nan))


def close(found: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def assert_slope(loss: Callable[[Tensor], Tensor], formula: Callable[[Numbers], Numbers], at: Numbers) -> None:
    """The gradient of a loss is the slope of its formula, where that has one: left and right of a corner it differs."""
    given = torch.from_numpy(at.copy()).requires_grad_()
    (found,) = torch.autograd.grad(loss(given).sum(), given)
    step = 1e-6
    left, here, right = formula(at - step), formula(at), formula(at + step)
    slope = (right - left) / (2 * step)
    has_corner = np.abs((right - here) - (here - left)) > 1e-4 * step * (1 + np.abs(slope))
    slope = np.where(has_corner, found.numpy(), slope)
    np.testing.assert_allclose(found.numpy(), slope, rtol=1e-4, atol=1e-4)


def sigmoid(values: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-values))


@drawn(60)
@given(st.data(), st.integers(1, 4), st.floats(0.01, 3), st.floats(0, 0.5), st.floats(-2, 2))
def test_pairs_lose_what_the_papers_say(
    data: st.DataObject, count: int, beta: float, smoothing: float, margin: float
) -> None:
    chosen, rejected, chosen_before, rejected_before = (grid(data, (count,), st.floats(-9, -1e-3)) for _ in range(4))
    ratio = (chosen - chosen_before) - (rejected - rejected_before)
    every = map(torch.from_numpy, (chosen, rejected, chosen_before, rejected_before))
    close(pairs.logratio_margin(*every), ratio)
    odds = np.exp(rejected) / (1 - np.exp(rejected))
    lengths = data.draw(arrays.arrays(np.int64, (count,), elements=st.integers(1, 9)))
    other = torch.from_numpy(rejected)
    formulas: list[tuple[Callable[[Tensor], Tensor], Callable[[Numbers], Numbers], Numbers]] = [
        (
            lambda x: pairs.dpo_loss(x, beta, smoothing),
            lambda x: -(1 - smoothing) * np.log(sigmoid(beta * x)) - smoothing * np.log(sigmoid(-beta * x)),
            ratio,
        ),
        (lambda x: pairs.ipo_loss(x, beta), lambda x: (x - 0.5 / beta) ** 2, ratio),
        (
            lambda x: pairs.orpo_loss(x, other),
            lambda x: -np.log(sigmoid(np.log(np.exp(x) / (1 - np.exp(x)) / odds))),
            chosen,
        ),
        (
            lambda x: pairs.simpo_loss(x, other, beta, margin),
            lambda x: -np.log(sigmoid(beta * (x - rejected) - margin)),
            chosen,
        ),
        (lambda x: pairs.rpo_loss(x, torch.from_numpy(lengths)), lambda x: -x / lengths, chosen),
        (
            lambda x: pairs.pairwise_loss(x, other, torch.tensor(margin, dtype=torch.float64), smoothing),
            lambda x: -np.log(sigmoid(x - rejected - margin)) + smoothing * (x + rejected) ** 2,
            chosen,
        ),
    ]
    for loss, formula, at in formulas:
        # 1 - exp of a logarithm near 0 keeps fewer digits in the formula than in ours.
        close(loss(torch.from_numpy(at)), formula(at), 1e-8)
        # Steps must stay below 0, where logarithms of probabilities end.
        assert_slope(loss, formula, np.minimum(at, -1e-3) if at is chosen else at)


@drawn(40)
@given(st.data(), st.integers(1, 5), st.floats(-3, 3), st.floats(0.01, 3))
def test_single_answers_lose_what_kto_says(data: st.DataObject, count: int, kl: float, beta: float) -> None:
    ratios, good = grid(data, (count,)), masks(data, (count,))
    baseline = torch.tensor(kl, dtype=torch.float64, requires_grad=True)
    signs = np.where(good, 1.0, -1.0)

    def loss(x: Tensor) -> Tensor:
        return pairs.kto_loss(x, torch.from_numpy(good), baseline, beta)

    def formula(x: Numbers) -> Numbers:
        return 1 - sigmoid(signs * beta * (x - max(kl, 0)))

    close(loss(torch.from_numpy(ratios)), formula(ratios))
    assert_slope(loss, formula, ratios)
    # Of what it is given, the baseline alone could have a gradient.
    assert not loss(torch.from_numpy(ratios)).requires_grad


@pytest.mark.parametrize("loss", sorted(REFUSED))
def test_a_loss_that_trl_has_beside_is_refused_by_its_name(loss: str) -> None:
    with pytest.raises(ConfigError, match=loss):
        from_dict(PreferenceLossOptions, {"loss": loss}, "preference")


@drawn(60)
@given(st.data(), SIZES, st.floats(0, 1), st.floats(0, 2), st.none() | st.floats(1.01, 4), st.booleans())
def test_a_policy_loses_what_the_clipped_surrogates_say(
    data: st.DataObject, size: tuple[int, int], low: float, high: float, dual: float | None, is_sequence: bool
) -> None:
    new, old, gains = (grid(data, size, st.floats(-4, 4)) for _ in range(3))
    mask, weights = masks(data, size), np.abs(grid(data, size))
    clip = losses.ClipOptions(low=low, high=high, dual=dual)
    given_mask = torch.from_numpy(mask) if is_sequence else None

    def surrogate(x: Numbers) -> Numbers:
        difference = x - old
        if is_sequence:
            means = [row[kept].mean() if kept.any() else 0.0 for row, kept in zip(difference, mask, strict=True)]
            difference = np.repeat(np.array(means)[:, None], size[1], axis=1)
        ratio = np.exp(difference)
        gain = np.minimum(ratio * gains, np.clip(ratio, 1 - low, 1 + high) * gains)
        bounded = gain if dual is None else np.where(gains < 0, np.maximum(gain, dual * gains), gain)
        return -bounded * weights

    def policy(x: Tensor) -> Tensor:
        before, gain, weight = map(torch.from_numpy, (old, gains, weights))
        return losses.policy_loss(x, before, gain, clip, weight, given_mask)[0]

    close(policy(torch.from_numpy(new)), surrogate(new))
    if not is_sequence:
        assert_slope(policy, surrogate, new)
    held = np.clip(np.exp(new - old), 1 - low, 1 + high)
    inputs = [torch.from_numpy(each) for each in (new, old, gains)]
    found = losses.cispo_loss(inputs[0], inputs[1], inputs[2], clip, torch.from_numpy(weights))
    close(found[0], -held * gains * new * weights)
    # The ratio has no gradient.
    assert_slope(
        lambda x: losses.cispo_loss(x, inputs[1], inputs[2], clip)[0],
        lambda x: -np.clip(np.exp(new - old), 1 - low, 1 + high) * gains * x,
        new,
    )


@drawn(40)
@given(st.data(), SIZES, st.none() | st.floats(0.01, 3))
def test_a_critic_loses_what_ppo_says(data: st.DataObject, size: tuple[int, int], limit: float | None) -> None:
    values, old, returns = (grid(data, size) for _ in range(3))

    def formula(x: Numbers) -> Numbers:
        free = (x - returns) ** 2
        return (
            free / 2 if limit is None else np.maximum(free, (np.clip(x, old - limit, old + limit) - returns) ** 2) / 2
        )

    def loss(x: Tensor) -> Tensor:
        return losses.value_loss(x, torch.from_numpy(old), torch.from_numpy(returns), limit)

    close(loss(torch.from_numpy(values)), formula(values))
    assert_slope(loss, formula, values)


ESTIMATES: dict[Any, Callable[[Numbers], Numbers]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


@drawn(40)
@given(st.data(), SIZES, st.sampled_from(sorted(ESTIMATES)))
def test_divergences_are_estimated_as_by_schulman(data: st.DataObject, size: tuple[int, int], kind: Any) -> None:
    new, before, behaviour = (grid(data, size, st.floats(-4, 4)) for _ in range(3))
    reference, rollout = torch.from_numpy(before), torch.from_numpy(behaviour)
    estimate = ESTIMATES[kind]
    close(kl_estimate(torch.from_numpy(new), reference, kind), estimate(new - before))
    assert_slope(lambda x: biased_kl_loss(x, reference, kind), lambda x: estimate(x - before), new)
    held = np.exp(new - behaviour)
    close(kl_loss(torch.from_numpy(new), reference, kind, rollout), held * estimate(new - before))
    # The weight of k2 has no gradient, those of the others have.
    assert_slope(
        lambda x: kl_loss(x, reference, kind, rollout),
        lambda x: (held if kind == "k2" else np.exp(x - behaviour)) * estimate(x - before),
        new,
    )


@drawn(40)
@given(st.floats(0, 2), st.lists(st.tuples(st.floats(0, 40), st.integers(1, 400)), max_size=5), st.integers(1, 500))
def test_the_coefficient_follows_ziegler(coef: float, steps: list[tuple[float, int]], horizon: int) -> None:
    controller = KlController(KlControllerOptions(controller="adaptive", coef=coef, target=6.0, horizon=horizon))
    for kl, count in steps:
        controller.update(kl, count)
        coef *= max(0.0, 1 + float(np.clip(kl / 6 - 1, -0.2, 0.2)) * count / horizon)
        assert controller.coef == pytest.approx(coef, rel=1e-12)


@drawn(60)
@given(st.data(), SIZES, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_advantages_are_those_of_a_loop(
    data: st.DataObject, size: tuple[int, int], gamma: float, trace: float, of_tokens: bool
) -> None:
    scores = grid(data, size if of_tokens else size[:1])
    penalties, values, mask = grid(data, size), grid(data, size), masks(data, size)
    given_mask = torch.from_numpy(mask)
    given_scores = hidden(scores, mask) if of_tokens else torch.from_numpy(scores)
    rewards = ours.token_rewards(given_scores, hidden(penalties, mask), given_mask)
    found = ours.gae_advantages(rewards, hidden(values, mask), given_mask, gamma, trace)
    returns = ours.discounted_returns(rewards, given_mask, gamma)
    wanted = [np.zeros(size) for _ in range(3)]
    for row in range(size[0]):
        places = np.flatnonzero(mask[row]).tolist()
        following, running, total = 0.0, 0.0, 0.0
        for place in reversed(places):
            reward = -penalties[row, place] + (scores[row, place] if of_tokens else 0.0)
            reward += scores[row] if not of_tokens and place == places[-1] else 0.0
            error = reward + gamma * following - values[row, place]
            running = error + gamma * trace * running
            total, following = reward + gamma * total, values[row, place]
            for grids, value in zip(wanted, (reward, running, total), strict=True):
                grids[row, place] = value
    for each, expected in zip((rewards, found, returns), wanted, strict=True):
        close(each, expected, 1e-8)


@drawn(40)
@given(st.data(), st.integers(1, 4), st.integers(2, 6))
def test_groups_are_compared_as_by_their_papers(data: st.DataObject, prompts: int, size: int) -> None:
    scores = grid(data, (prompts, size), st.integers(-3, 3).map(float) | st.floats(-9, 9))
    given_scores = torch.from_numpy(scores)
    mean = scores.mean(1, keepdims=True)
    varies = (scores.max(1) - scores.min(1) > 1e-9 * np.abs(scores).max(1))[:, None]
    others = (scores.sum(1, keepdims=True) - scores) / (size - 1)
    spread = scores.std(1, ddof=1, keepdims=True) + ours.GROUP_EPSILON
    close(ours.group_advantages(given_scores, "dr_grpo"), (scores - mean) * varies)
    close(ours.group_advantages(given_scores, "grpo"), (scores - mean) / spread * varies)
    close(ours.group_advantages(given_scores, "rloo"), (scores - others) * varies)


@drawn(40)
@given(st.data(), SIZES)
def test_advantages_are_whitened_over_the_tokens(data: st.DataObject, size: tuple[int, int]) -> None:
    values, mask = grid(data, size), masks(data, size)
    found = ours.masked_whiten(hidden(values, mask), torch.from_numpy(mask))
    kept = values[mask]
    mean, spread = (kept.mean(), kept.std(ddof=1)) if len(kept) > 1 else (kept.sum(), 0.0)
    scaled = (kept - mean) / np.sqrt(spread**2 + ours.WHITEN_EPSILON) if len(kept) > 1 else kept - mean
    wanted = np.zeros(size)
    wanted[mask] = scaled
    close(found, wanted, 1e-7)


@drawn(40)
@given(st.data(), SIZES, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(["truncate", "mask"]))
def test_tokens_of_another_policy_are_weighed(
    data: st.DataObject, size: tuple[int, int], level: Any, mode: Any
) -> None:
    old, rollout, mask = grid(data, size, st.floats(-2, 2)), grid(data, size, st.floats(-2, 2)), masks(data, size)
    least, most = data.draw(st.floats(0, 1)), data.draw(st.floats(1, 5))
    options = losses.ImportanceSamplingOptions(mode=mode, level=level, min=least, max=most)
    found = losses.importance_weights(hidden(old, mask), hidden(rollout, mask), torch.from_numpy(mask), options)
    assert found is not None
    for row in range(size[0]):
        kept = (old - rollout)[row][mask[row]]
        of_all = {"sequence": kept.sum(), "geometric": kept.mean() if len(kept) else 0.0}
        ratios = np.exp(kept if level == "token" else np.full(len(kept), of_all[level]))
        bounded = np.clip(ratios, least, most)
        inside = (ratios >= least) & (ratios <= most)
        close(found[row][torch.from_numpy(mask[row])], bounded if mode == "truncate" else ratios * inside)


@drawn(40)
@given(st.data(), SIZES, st.integers(1, 20))
def test_tokens_are_averaged_as_the_modes_say(data: st.DataObject, size: tuple[int, int], longest: int) -> None:
    values, mask = grid(data, size), masks(data, size)
    rows: Sequence[Numbers] = [row[kept] for row, kept in zip(values, mask, strict=True) if kept.any()]
    if not rows:
        return
    wanted: dict[Any, float] = {
        "token-mean": float(values[mask].mean()),
        "seq-mean-token-mean": float(np.mean([row.mean() for row in rows])),
        "seq-mean-token-sum": float(np.mean([row.sum() for row in rows])),
        "constant": float(sum(row.sum() for row in rows) / (longest * len(rows))),
    }
    given_mask = torch.from_numpy(mask)
    for mode, expected in wanted.items():
        below = losses.loss_denominator(given_mask, mode, longest)
        close(losses.aggregate(hidden(values, mask), given_mask, mode, below), expected)
