"""Cached decoding equals full recomputation, for every position scheme, alone and in a padded batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.cache import ContiguousCache
from kitforge.inference.generate import generate, stream
from kitforge.inference.sampling import SamplingOptions
from tests.core.nn.networks import CONFIGS, VOCAB, build

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
# The dynamic scheme's model ends where its training ended.
SHORT = [[3, 1], [9]]


def network(name: str) -> Decoder:
    return build(CONFIGS[name]).requires_grad_(False).eval()


def prompts_for(model: Decoder) -> list[list[int]]:
    return SHORT if model.geometry.max_length < 16 else PROMPTS


def full_logits(model: Decoder, tokens: list[int], final_length: int) -> Tensor:
    """The last position's logits [vocab] by a plain forward pass over the whole text."""
    context = Context(lengths=torch.tensor([[final_length]]))
    return model(torch.tensor([tokens]), context)[0, -1]


def greedy(model: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(full_logits(model, tokens, len(prompt) + num_tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_equal_those_of_a_full_pass(name: str) -> None:
    model = network(name)
    total = model.geometry.max_length
    tokens = torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(1))
    cache = ContiguousCache(model.geometry, torch.zeros(1, dtype=torch.long), total, torch.float64)
    lengths = torch.tensor([[total]])
    # A prompt, a few at once, then one by one.
    for piece in torch.split(tokens, [2, 1] + [1] * (total - 3), dim=1):
        context = Context(positions=cache.begin(piece.shape[1]), lengths=lengths, attend=cache)
        cached = model(piece, context)[0, -1]
        wanted = full_logits(model, tokens[0, : cache.used].tolist(), total)
        assert float((cached - wanted).abs().max()) < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_every_prompt_of_a_padded_batch_goes_on_as_it_does_alone(name: str) -> None:
    model = network(name)
    prompts = prompts_for(model)
    num_tokens = 2 if prompts is SHORT else 8
    outputs = generate(model, prompts, SamplingOptions(max_new_tokens=num_tokens))
    assert outputs == [greedy(model, prompt, num_tokens) for prompt in prompts]


def test_a_cache_that_forgets_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = network("llama"), SamplingOptions(max_new_tokens=8)
    wanted = generate(model, PROMPTS, options)
    begin = ContiguousCache.begin
    monkeypatch.setattr(ContiguousCache, "begin", lambda cache, count: begin(cache, count) + cache.starts.unsqueeze(1))
    monkeypatch.setattr(ContiguousCache, "_mask", lambda *_: None)
    assert generate(model, PROMPTS, options) != wanted


def test_each_text_ends_with_any_of_the_stop_tokens() -> None:
    model, options = network("gpt2"), SamplingOptions(max_new_tokens=8)
    free = generate(model, PROMPTS, options)
    stops = {free[0][3], free[1][5]}
    cut = generate(model, PROMPTS, options, stops)
    for whole, ended in zip(free, cut, strict=True):
        place = next((place for place, token in enumerate(whole) if token in stops), len(whole))
        assert ended == whole[:place]
    assert len(cut[0]) <= 3


def test_a_stream_tells_which_texts_have_ended() -> None:
    model, options = network("gpt2"), SamplingOptions(max_new_tokens=8)
    stop = generate(model, PROMPTS, options)[0][2]
    steps = list(stream(model, PROMPTS, options, {stop}))
    assert steps[-1][0] is None
    assert all(step[0] is None for step in steps[2:])


def test_sampled_text_depends_on_seed_and_request_alone() -> None:
    model = network("llama")
    options = SamplingOptions(max_new_tokens=8, temperature=1.0, seed=4)
    together = generate(model, PROMPTS, options)
    assert together == generate(model, PROMPTS, options)
    assert together[0] == generate(model, PROMPTS[:1], options)[0]
    assert together[2] == generate(model, PROMPTS[2:], options, first_request=2)[0]
    assert together != generate(model, PROMPTS, SamplingOptions(max_new_tokens=8, temperature=1.0, seed=5))


def test_equal_prompts_are_continued_differently() -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=1.0)
    outputs = generate(network("llama"), [[1, 2]] * 4, options)
    assert len({tuple(output) for output in outputs}) == 4


def test_the_models_mode_is_put_back() -> None:
    model = network("llama").train()
    generate(model, PROMPTS, SamplingOptions(max_new_tokens=2))
    assert model.training
    next(iter(stream(model, PROMPTS, SamplingOptions(max_new_tokens=2), ())))
    assert model.training


def test_no_prompts_give_no_texts() -> None:
    assert generate(network("llama"), [], SamplingOptions()) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="a prompt is empty"):
        generate(network("llama"), [[1], []], SamplingOptions(max_new_tokens=2))


def test_a_text_that_would_become_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 prompt tokens \+ 12 new ones = 17"):
        generate(network("llama"), PROMPTS, SamplingOptions(max_new_tokens=12))
    assert len(generate(network("llama"), PROMPTS, SamplingOptions(max_new_tokens=11))[0]) == 11
