from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.advantages import (
    discounted_returns,
    discounted_sums,
    gae_advantages,
    length_adaptive_lambda,
)
from tests.kits.rlhf.algorithms.sequences import LENGTHS, MASK, numbers

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


def test_a_trace_of_one_gives_what_came_minus_what_was_expected() -> None:
    rewards, values = numbers(2), numbers(3)
    found = gae_advantages(rewards, values, MASK, 0.9, 1.0)
    came = discounted_returns(rewards, MASK, 0.9)
    assert torch.allclose(found[MASK], (came - values)[MASK], atol=1e-10, rtol=0)
    row = LENGTHS.index(5)
    brute = [sum(0.9**ahead * float(rewards[row, at + ahead]) for ahead in range(5 - at)) for at in range(5)]
    assert came[row, :5].tolist() == pytest.approx(brute, abs=1e-10)


def test_a_trace_of_zero_gives_the_error_of_one_step() -> None:
    rewards, values = numbers(4), numbers(5)
    found = gae_advantages(rewards, values, MASK, 0.9, 0.0)
    inside = torch.where(MASK, values, 0.0)
    following = torch.cat([inside[:, 1:], torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    assert torch.allclose(found[MASK], (rewards + 0.9 * following - values)[MASK], atol=1e-10, rtol=0)


def test_nothing_outside_of_the_mask_is_read_or_written() -> None:
    rewards, values = numbers(6, outside=float("nan")), numbers(7, outside=float("inf"))
    found = gae_advantages(rewards, values, MASK, 1.0, 0.95)
    assert torch.isfinite(found).all()
    assert torch.equal(found[~MASK], torch.zeros_like(found[~MASK]))


def test_turns_are_as_if_nothing_stood_between_them() -> None:
    rewards, values = numbers(8, GAPS), numbers(9, GAPS)
    joined = torch.ones(1, 4, dtype=torch.bool)
    alone = gae_advantages(rewards[:1, GAPS[0]], values[:1, GAPS[0]], joined, 0.9, 0.8)
    assert torch.allclose(gae_advantages(rewards, values, GAPS, 0.9, 0.8)[0, GAPS[0]], alone[0], atol=1e-12, rtol=0)


def test_a_trace_for_each_sequence_is_each_sequences_own() -> None:
    rewards, values = numbers(10), numbers(11)
    traces = length_adaptive_lambda(MASK, alpha=0.5)
    found = gae_advantages(rewards, values, MASK, 1.0, traces)
    for row, length in enumerate(LENGTHS):
        trace = max(0.0, 1 - 1 / (0.5 * length))
        assert float(traces[row]) == pytest.approx(trace)
        alone = by_loop(rewards, values, MASK, 1.0, trace)[row]
        assert torch.allclose(found[row], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_sums_by_doubling_are_as_exact_as_the_loop(length: int) -> None:
    values = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    wanted, last = torch.zeros(4, length, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for place in reversed(range(length)):
        last = values[:, place].double() + 0.95 * last
        wanted[:, place] = last
    assert torch.allclose(discounted_sums(values, 0.95).double(), wanted, atol=1e-5, rtol=0)
