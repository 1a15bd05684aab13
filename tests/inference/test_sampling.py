"""Tokens are drawn from exactly the distribution that the options describe."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.foundation.errors import ConfigError
from kitforge.inference import sampling
from kitforge.inference.sampling import (
    SampleRequest,
    SamplingOptions,
    process_logits,
    sample_tokens,
    top_logprobs,
    uniforms,
)

NUM_TOKENS = 6
LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])


def draw(options: SamplingOptions, key: int = 0, position: int = 0, prompt: Sequence[int] = ()) -> SampleRequest:
    text = [*prompt, *range(position)]
    return SampleRequest(
        options=options,
        signature=options.signature(),
        history=text,
        prompt_length=len(prompt),
        position=position,
        key=key,
    )


def distribution(logits: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest] = ()) -> Tensor:
    return torch.softmax(process_logits(logits, options, draws), dim=-1)


@pytest.mark.parametrize(
    "choices", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.2}, {"temperature": 2.0}]
)
def test_draws_follow_the_distribution(choices: dict[str, float]) -> None:
    options = SamplingOptions(**{"temperature": 1.0} | choices)
    num_draws = 4000
    draws = [draw(options, key) for key in range(num_draws)]
    tokens, logprobs, _ = sample_tokens(LOGITS.expand(num_draws, -1), draws)
    counts = torch.bincount(torch.tensor(tokens), minlength=NUM_TOKENS).double()
    exact = distribution(LOGITS, options)[0].double()
    expected = exact * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    # 99.9 % of samples of five degrees of freedom lie below 20.5; the seed is fixed, so this is no lottery.
    assert chi_square < 20.5
    assert logprobs == pytest.approx(exact[torch.tensor(tokens)].log().tolist(), abs=1e-6)


def test_positions_of_a_text_are_drawn_independently() -> None:
    options = SamplingOptions(temperature=1.0)
    draws = [draw(options, position=position) for position in range(2000)]
    tokens = torch.tensor(sample_tokens(LOGITS.expand(2000, -1), draws)[0])
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double().view(6, 6)
    single = distribution(LOGITS, options)[0].double()
    expected = single[:, None] * single[None, :] * 1999
    often = expected > 5
    chi_square = float(((pairs - expected)[often] ** 2 / expected[often]).sum())
    assert chi_square < 2 * int(often.sum())


def test_noise_depends_on_seed_key_and_position_alone() -> None:
    options = SamplingOptions(temperature=1.0, seed=4)
    numbers = uniforms([draw(options, key, position) for key in range(30) for position in range(30)])
    assert len(set(numbers.tolist())) == 900
    other = SamplingOptions(temperature=1.0, seed=5)
    one, same, different = uniforms([draw(options, 2, 3), draw(options, 2, 3, prompt=[5, 5]), draw(other, 2, 3)])
    assert one == same == numbers[2 * 30 + 3] != different


@pytest.mark.parametrize("keys", [1, 300])
def test_noise_is_uniform_and_independent_of_the_number_before(keys: int) -> None:
    """Chi-square of pairs of neighbors, of one long text and of many short ones."""
    options, count = SamplingOptions(temperature=1.0), 30_000 // keys
    # Of no history, which noise does not read and which at the last position would be as long as the test.
    first = draw(options)
    places = itertools.product(range(keys), range(count))
    numbers = uniforms([replace(first, key=key, position=position) for key, position in places])
    cells = (20 * numbers).astype(int).reshape(keys, count)
    pairs = np.bincount((20 * cells[:, 1:] + cells[:, :-1]).ravel(), minlength=400)
    expected = pairs.sum() / 400
    # Of 399 degrees of freedom: four standard deviations from the mean.
    assert abs(float(((pairs - expected) ** 2 / expected).sum()) - 399) < 4 * (2 * 399) ** 0.5


def test_the_ends_of_the_unit_interval_fall_on_tokens_that_may_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SamplingOptions(temperature=1.0, top_k=2)
    logits = torch.tensor([[-3.0, 2.0, -4.0, 1.0, -5.0]])
    for point, token in ((0.0, 1), (1 - 2.0**-32, 3)):
        monkeypatch.setattr(sampling, "uniforms", lambda draws, point=point: np.full(len(draws), point))
        assert sample_tokens(logits, [draw(options)])[0] == [token]


def test_rows_of_different_options_do_not_mix() -> None:
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.6}, {"repetition_penalty": 2.0}]
    draws = [draw(SamplingOptions(**kind), key, position=2) for key, kind in enumerate(kinds * 3)]
    logits = torch.randn(len(draws), NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    alone = [sample_tokens(row.unsqueeze(0), [each]) for row, each in zip(logits, draws, strict=True)]
    tokens, logprobs, _ = sample_tokens(logits, draws)
    assert tokens == [token for (token,), _, _ in alone]
    assert logprobs == pytest.approx([logprob for _, (logprob,), _ in alone], abs=1e-6)


def test_temperature_zero_takes_the_most_likely_and_tells_how_likely_it_was() -> None:
    tokens, logprobs, _ = sample_tokens(LOGITS, [draw(SamplingOptions(top_k=1))])
    assert tokens == [0]
    assert logprobs == pytest.approx([float(LOGITS.log_softmax(-1)[0, 0])])


def test_penalties_and_bias_are_those_of_the_papers() -> None:
    options = SamplingOptions(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={"5": 7.0, "0": -1.0}
    )
    # The prompt says 5 and 2; then 2, 2 and 1 were generated.
    text = SampleRequest(options=options, signature=(), history=[5, 2, 2, 2, 1], prompt_length=2, position=3, key=0)
    got = process_logits(LOGITS, options, [text])[0].tolist()
    wanted = [2.0 - 1.0, 1.0 / 2 - 0.5 - 0.25, 0.5 / 2 - 0.5 - 2 * 0.25, 0.0, -1.0, -3.0 * 2 + 7.0]
    assert got == pytest.approx(wanted)
    assert LOGITS[0].tolist() == [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def test_ties_at_the_edge_of_top_k_all_stay() -> None:
    got = distribution(torch.tensor([[1.0, 1.0, 0.0]]), SamplingOptions(temperature=1.0, top_k=1))
    assert got.tolist() == [[0.5, 0.5, 0.0]]


def test_half_precision_is_widened_before_anything_is_counted() -> None:
    logits = LOGITS.to(torch.bfloat16)
    assert process_logits(logits, SamplingOptions(temperature=0.7)).dtype == torch.float32
    assert process_logits(LOGITS.double(), SamplingOptions(temperature=0.7)).dtype == torch.float64


@pytest.mark.parametrize(
    "choices",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"logit_bias": {"the": 1.0}},
    ],
)
def test_options_out_of_range_are_refused(choices: dict[str, Any]) -> None:
    name = next(iter(choices))
    with pytest.raises(ConfigError, match=f"inference.{name}"):
        SamplingOptions(**choices)


def test_a_temperature_near_zero_takes_the_most_likely_token() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-5, 1e-38, 2e-207):
        options = SamplingOptions(temperature=temperature)
        drawn = SampleRequest(options=options, signature=0, history=(), prompt_length=0, position=0, key=0)
        assert sample_tokens(logits, [drawn] * 3) == (logits.argmax(-1).tolist(), [0.0] * 3, True)


@pytest.mark.parametrize("num", [0, 1, 3, NUM_TOKENS, 50])
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(temperature=0.7),
        SamplingOptions(temperature=1.3, top_k=2),
        SamplingOptions(temperature=1.0, top_p=0.8, min_p=0.01),
    ],
    ids=["greedy", "warm", "top_k", "top_p"],
)
def test_the_most_likely_tokens_are_told_in_order(options: SamplingOptions, num: int) -> None:
    logits = LOGITS[0].roll(2).tolist()
    warm = options if options.temperature else SamplingOptions(temperature=1.0)
    shares = distribution(torch.tensor([logits]), warm)[0].tolist()
    order = sorted((token for token in range(NUM_TOKENS) if shares[token]), key=lambda token: -shares[token])[:num]
    wants, wants_none = replace(draw(options), num_top_logprobs=num), draw(options)
    found = top_logprobs(torch.tensor([logits] * 2), [wants, wants_none])
    assert [token for token, _ in found[0]] == order
    assert [value for _, value in found[0]] == pytest.approx([math.log(shares[token]) for token in order], abs=1e-5)
    assert found[1] == []


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "choices",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 50}, {"temperature": 0.3, "repetition_penalty": 1.3}],
    ids=["greedy", "warm", "top_k", "penalty"],
)
@torch.no_grad()
def test_the_sampled_token_is_told_with_the_bits_of_its_log_probability(
    choices: dict[str, Any], dtype: torch.dtype, level: CompileLevel
) -> None:
    options, kernels = SamplingOptions(**choices), select(level)
    draws = [replace(draw(options, key, position=3), num_top_logprobs=3000) for key in range(8)]
    logits = (3 * torch.randn(8, 3000, generator=torch.Generator().manual_seed(1))).to(dtype)
    tokens, logprobs, _ = sample_tokens(logits, draws, kernels=kernels)
    found = top_logprobs(logits, draws, kernels)
    assert [dict(told)[token] for told, token in zip(found, tokens, strict=True)] == logprobs
    exact = distribution(logits, options, draws).log()
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(exact, tokens, strict=True)], abs=5e-6)
    assert [sum(math.exp(value) for _, value in told) for told in found] == pytest.approx([1.0] * 8, abs=1e-5)


def test_the_most_likely_tokens_are_those_after_penalties() -> None:
    options = SamplingOptions(presence_penalty=1.2, logit_bias={"5": 6.0})
    drawn = replace(draw(options, position=1), num_top_logprobs=3)
    assert [token for token, _ in top_logprobs(LOGITS, [drawn])[0]] == [5, 1, 0]


def test_a_choice_among_few_logits_wakes_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on spinning where the next step wants to compute."""
    seen: list[int] = []
    found = sampling.process_logits
    monkeypatch.setattr(
        sampling, "process_logits", lambda *given: (seen.append(torch.get_num_threads()), found(*given))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sample_tokens(torch.zeros(1, 9), [draw(SamplingOptions())])
        sample_tokens(torch.zeros(1, sampling.SINGLE_THREAD_LOGITS + 1), [draw(SamplingOptions())])
        assert (seen, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(before)
