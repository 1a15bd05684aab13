from typing import get_args

import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.advantages import (
    Baseline,
    discounted_sums,
    gae_advantages,
    group_advantages,
    has_reward_variance,
    last_token_mask,
    masked_whiten,
    missing_eos_scores,
    overlong_penalty,
    token_rewards,
)
from tests.kits.rlhf.algorithms.sequences import LENGTHS, MASK, numbers

SCORES = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)


def test_a_sequence_earns_its_score_less_its_penalties() -> None:
    penalties = numbers(0)
    rewards = token_rewards(SCORES, penalties, MASK)
    wanted = SCORES - torch.where(MASK, penalties, 0.0).sum(-1)
    assert torch.allclose(rewards.sum(-1), wanted, atol=1e-12, rtol=0)


def test_the_score_stands_once_at_the_last_generated_token() -> None:
    rewards = token_rewards(SCORES, torch.zeros(MASK.shape, dtype=torch.float64), MASK)
    places = [(row, length - 1) for row, length in enumerate(LENGTHS)]
    assert [tuple(place) for place in rewards.nonzero().tolist()] == places
    assert [float(rewards[place]) for place in places] == SCORES.tolist()


def test_scores_of_tokens_stand_where_they_are() -> None:
    scores, penalties = numbers(1), numbers(2)
    rewards = token_rewards(scores, penalties, MASK)
    assert torch.equal(rewards[MASK], (scores - penalties)[MASK])
    assert torch.equal(rewards[~MASK], torch.zeros_like(rewards[~MASK]))


def test_what_a_tool_said_earns_nothing() -> None:
    mask = torch.tensor([[True, True, False, False, True, False]])
    rewards = token_rewards(torch.tensor([3.0]), torch.full((1, 6), 0.5), mask)
    assert rewards.tolist() == [[-0.5, -0.5, 0.0, 0.0, 2.5, 0.0]]


def test_a_response_without_a_token_earns_nothing() -> None:
    mask = torch.zeros(1, 4, dtype=torch.bool)
    assert not last_token_mask(mask).any()
    assert token_rewards(torch.tensor([3.0]), torch.ones(1, 4), mask).tolist() == [[0.0] * 4]


def test_a_text_without_an_end_costs_the_penalty() -> None:
    assert missing_eos_scores(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 2.5).tolist() == [1.0, -1.5]


def test_the_overlong_penalty_rises_over_the_last_tokens() -> None:
    lengths = torch.tensor([10, 80, 85, 90, 100, 120])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx([0, 0, 0.25, 0.5, 1, 1])
    assert overlong_penalty(lengths, max_length=100, buffer=0).tolist() == [0, 0, 0, 0, 0, 1]


GAPS = torch.tensor(
    [[True, False, False, True, True, False, True, False], [False, True, True, False, False, True, True, True]]
)


def by_loop(rewards: Tensor, values: Tensor, mask: Tensor, discount: float, trace: float) -> Tensor:
    """Token by token from the back, as the paper has it."""
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        following, last = 0.0, 0.0
        for place in reversed(mask[row].nonzero().flatten().tolist()):
            error = float(rewards[row, place]) + discount * following - float(values[row, place])
            last = error + discount * trace * last
            found[row, place], following = last, float(values[row, place])
    return found


@pytest.mark.parametrize("mask", [MASK, GAPS], ids=["padded", "turns"])
@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_they_are_those_of_a_loop(mask: Tensor, discount: float, trace: float) -> None:
    rewards, values = numbers(0, mask), numbers(1, mask)
    found = gae_advantages(rewards, values, mask, discount, trace)
    assert torch.allclose(found, by_loop(rewards, values, mask, discount, trace), atol=1e-10, rtol=0)


def test_nothing_outside_of_the_mask_is_read_or_written() -> None:
    rewards, values = numbers(6, outside=float("nan")), numbers(7, outside=float("inf"))
    found = gae_advantages(rewards, values, MASK, 1.0, 0.95)
    assert torch.isfinite(found).all()
    assert torch.equal(found[~MASK], torch.zeros_like(found[~MASK]))


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_sums_by_doubling_are_as_exact_as_the_loop(length: int) -> None:
    values = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    wanted, last = torch.zeros(4, length, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for place in reversed(range(length)):
        last = values[:, place].double() + 0.95 * last
        wanted[:, place] = last
    assert torch.allclose(discounted_sums(values, 0.95).double(), wanted, atol=1e-5, rtol=0)


ONE_SUCCESS = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(baseline: Baseline, wanted: list[float]) -> None:
    assert group_advantages(ONE_SUCCESS, baseline)[0].tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("baseline", get_args(Baseline))
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_scores_say_nothing_at_all(baseline: Baseline, size: int) -> None:
    # 0.1 added up and divided is not 0.1, and a deviation that is rounding would blow it up.
    scores = torch.full((2, size), 0.1)
    assert torch.equal(group_advantages(scores, baseline), torch.zeros(2, size))
    assert not has_reward_variance(scores).any()
    assert has_reward_variance(ONE_SUCCESS).tolist() == [[True]]


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e9])
@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo"])
def test_scores_that_differ_by_rounding_are_no_signal_at_any_size(size: float, baseline: Baseline) -> None:
    ways = (0.1 * 3, 0.3, 0.1 + 0.2, 0.1 + 0.1 + 0.1)
    rounded = size * torch.tensor([ways], dtype=torch.float64)
    assert len(set(rounded.flatten().tolist())) > 1
    assert has_reward_variance(rounded).tolist() == [[False]]
    assert group_advantages(rounded, baseline).tolist() == [[0.0] * 4]
    differing = size * torch.tensor([[*ways[:3], 0.3 * (1 + 1e-6)]], dtype=torch.float64)
    assert has_reward_variance(differing).tolist() == [[True]]
    assert group_advantages(differing, baseline).abs().min() > 0
    assert has_reward_variance(-differing).tolist() == [[True]]


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_groups_of_one_are_refused(baseline: Baseline) -> None:
    with pytest.raises(ConfigError, match="groups of 1"):
        group_advantages(torch.zeros(3, 1), baseline)


def test_true_tokens_have_mean_zero_and_variance_one_and_others_are_zero() -> None:
    whitened = masked_whiten(numbers(0) * 7 + 3, MASK)
    assert abs(float(whitened[MASK].mean())) < 1e-12
    assert abs(float(whitened[MASK].var()) - 1) < 1e-8
    assert torch.equal(whitened[~MASK], torch.zeros_like(whitened[~MASK]))


def test_less_than_two_tokens_are_left_alone() -> None:
    mask = torch.tensor([[True, False]])
    value = torch.tensor([[3.0, float("nan")]])
    assert masked_whiten(value, mask).tolist() == [[0.0, 0.0]]
    assert masked_whiten(value, ~mask & mask).tolist() == [[0.0, 0.0]]
