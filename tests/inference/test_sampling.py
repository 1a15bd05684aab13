"""Tokens are drawn from exactly the distribution that the options describe."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitforge.foundation.errors import ConfigError
from kitforge.inference.sampling import SamplingOptions, choose, probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])


def plain(logits: list[float], options: SamplingOptions) -> list[float]:
    """The distribution, told with plain numbers."""
    weights = [math.exp(logit / options.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: options.top_k]
    total = sum(weights[token] for token in kept)
    if options.top_p is not None:
        held, nucleus = 0.0, []
        for token in kept:
            if held < options.top_p:
                nucleus.append(token)
            held += weights[token] / total
        kept = nucleus
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 2, 5, 100]),
    top_p=st.sampled_from([None, 0.013, 0.31, 0.77, 0.97, 1.0]),
)
def test_the_distribution_is_the_one_described(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    scores = [logit / 10 for logit in logits]
    got = probabilities(torch.tensor([scores]), options)[0].tolist()
    assert got == pytest.approx(plain(scores, options), abs=1e-6)


@pytest.mark.parametrize(
    "choices", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}, {"temperature": 2.0}]
)
def test_draws_follow_the_distribution(choices: dict[str, float]) -> None:
    options = SamplingOptions(**{"temperature": 1.0} | choices)
    num_draws = 4000
    tokens = choose(LOGITS.expand(num_draws, -1), options, list(range(num_draws)), 0)
    counts = torch.bincount(tokens, minlength=6).double()
    expected = probabilities(LOGITS, options)[0].double() * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    # 99.9 % of samples of five degrees of freedom lie below 20.5; the seed is fixed, so this is no lottery.
    assert chi_square < 20.5


def test_positions_of_a_text_are_drawn_independently() -> None:
    options = SamplingOptions(temperature=1.0)
    tokens = torch.cat([choose(LOGITS, options, [0], position) for position in range(2000)])
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double().view(6, 6)
    single = probabilities(LOGITS, options)[0].double()
    expected = single[:, None] * single[None, :] * 1999
    often = expected > 5
    chi_square = float(((pairs - expected)[often] ** 2 / expected[often]).sum())
    assert chi_square < 2 * int(often.sum())


def test_temperature_zero_takes_the_most_likely() -> None:
    assert choose(LOGITS, SamplingOptions(), [0], 0).tolist() == [0]


def test_ties_at_the_edge_of_top_k_all_stay() -> None:
    got = probabilities(torch.tensor([[1.0, 1.0, 0.0]]), SamplingOptions(temperature=1.0, top_k=1))
    assert got.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize(
    "choices", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_options_out_of_range_are_refused(choices: dict[str, float]) -> None:
    name = next(iter(choices))
    with pytest.raises(ConfigError, match=f"inference.{name}"):
        SamplingOptions(**choices)
