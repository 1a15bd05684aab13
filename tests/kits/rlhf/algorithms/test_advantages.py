import itertools
import statistics
from typing import get_args

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.advantages import (
    Baseline,
    discounted_sums,
    group_advantages,
    has_reward_variance,
    last_token_mask,
    missing_eos_scores,
    overlong_penalty,
    token_rewards,
)
from kitforge.kits.rlhf.algorithms.pass_at_k import measured_k, pass_at_k


def test_a_response_without_a_token_earns_nothing() -> None:
    mask = torch.zeros(1, 4, dtype=torch.bool)
    assert not last_token_mask(mask).any()
    assert token_rewards(torch.tensor([3.0]), torch.ones(1, 4), mask).tolist() == [[0.0] * 4]


def test_a_score_is_on_the_last_token_and_penalties_are_on_each() -> None:
    found = token_rewards(torch.tensor([3.0]), torch.tensor([[0.5, 0.25, 9.0]]), torch.tensor([[True, True, False]]))
    assert found.tolist() == [[-0.5, 2.75, 0.0]]


def test_a_text_without_an_end_costs_the_penalty() -> None:
    assert missing_eos_scores(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 2.5).tolist() == [1.0, -1.5]


def test_the_overlong_penalty_rises_over_the_last_tokens() -> None:
    lengths = torch.tensor([10, 80, 85, 90, 100, 120])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx([0, 0, 0.25, 0.5, 1, 1])
    assert overlong_penalty(lengths, max_length=100, buffer=0).tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_sums_by_doubling_are_as_exact_as_the_loop(length: int) -> None:
    values = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    wanted, last = torch.zeros(4, length, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for place in reversed(range(length)):
        last = values[:, place].double() + 0.95 * last
        wanted[:, place] = last
    assert torch.allclose(discounted_sums(values, 0.95).double(), wanted, atol=1e-5, rtol=0)


ONE_SUCCESS = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


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


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_correct_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        correct = [place < num_correct for place in range(num_samples)]
        for k in range(1, num_samples + 1):
            wanted = statistics.fmean(any(chosen) for chosen in itertools.combinations(correct, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(wanted)


def test_powers_of_two_are_measured_and_all_samples() -> None:
    assert [measured_k(each) for each in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
