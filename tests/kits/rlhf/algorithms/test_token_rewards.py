from __future__ import annotations

import pytest
import torch

from kitforge.kits.rlhf.algorithms.token_rewards import (
    last_token_mask,
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
