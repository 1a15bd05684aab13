"""Log-probabilities of prompts are those of a plain forward pass, whatever the engine does meanwhile."""

from dataclasses import replace

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from kitforge.inference.engine import Engine
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.inference.recomputation import LENGTH, by_sample, logits_of, network, recomputed

STEM = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
PROMPTS = [[*STEM, 2, 3, 8], [*STEM, 4], STEM, [7], [7, 1]]
TOLD = SamplingOptions(max_new_tokens=4, prompt_logprobs=3)
ENGINES = {
    "plain": EngineOptions(),
    "in pieces": EngineOptions(max_num_batched_tokens=4, max_num_seqs=3, block_size=2),
    "paged": EngineOptions(kv_layout="paged", block_size=2, max_num_batched_tokens=5, max_num_seqs=2),
    "guessing": EngineOptions(prompt_lookup_tokens=3, block_size=3, max_num_batched_tokens=7, max_num_seqs=4),
}


def expected(name: str, prompt: list[int], options: SamplingOptions) -> list[PromptLogprob]:
    logits = logits_of(network(name), prompt, len(prompt) + options.max_new_tokens)
    found = []
    for row, token in zip(logits.log_softmax(-1), prompt[1:], strict=False):
        values, tokens = row.topk(options.prompt_logprobs or 0)
        others = list(zip(tokens.tolist(), values.tolist(), strict=True))
        rank = int((row > row[token]).sum()) + 1
        found.append(PromptLogprob(logprob=row[token].item(), rank=rank, top_logprobs=others))
    return found


def assert_equal(found: list[PromptLogprob] | None, wanted: list[PromptLogprob]) -> None:
    assert found is not None and len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9) and one.rank == other.rank
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]
        values = [value for _, value in other.top_logprobs]
        assert [value for _, value in one.top_logprobs] == pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ENGINES)
def test_they_are_those_of_a_plain_pass_and_change_no_text(name: str, kind: str) -> None:
    """Twice over one engine, so that the second time every beginning is in the cache; half of the requests do not
    ask."""
    model = network(name)
    engine = Engine(model, ENGINES[kind])
    for _ in range(2):
        asked = {engine.submit(prompt, TOLD, num_samples=2, key=0): prompt for prompt in PROMPTS}
        others = [engine.submit(prompt, replace(TOLD, prompt_logprobs=None)) for prompt in PROMPTS]
        found = by_sample(engine)
        for request, prompt in asked.items():
            first, *rest = found[request, 0]
            assert_equal(first.prompt_logprobs, expected(name, prompt, TOLD))
            assert all(output.prompt_logprobs is None for output in (*rest, *found[request, 1]))
            tokens = [token for output in (first, *rest) for token in output.tokens]
            assert tokens == recomputed(model, prompt, TOLD).tokens
        assert all(output.prompt_logprobs is None for request in others for output in found[request, 0])


def test_a_prompt_that_is_given_up_half_way_is_told_once() -> None:
    engine = Engine(network("llama"), EngineOptions(max_num_batched_tokens=4, max_num_seqs=2, block_size=2))
    request = engine.submit(PROMPTS[0], TOLD)
    engine.step()
    engine.step()
    engine.update_weights(1)
    found = by_sample(engine)[request, 0]
    assert engine.stats()["preemptions"] == 1
    assert_equal(found[0].prompt_logprobs, expected("llama", PROMPTS[0], TOLD))


@pytest.mark.parametrize("name", ["llama", "dynamic"])
def test_a_prompt_as_long_as_the_model_can_be_told_without_a_token_more(name: str) -> None:
    prompt, only = [token % 29 for token in range(LENGTH)], SamplingOptions(max_new_tokens=0, prompt_logprobs=0)
    engine = Engine(network(name), EngineOptions(max_num_batched_tokens=16))
    request = engine.submit(prompt, only, num_samples=2)
    found = by_sample(engine)
    assert_equal(found[request, 0][0].prompt_logprobs, expected(name, prompt, only))
    assert all((each[0].tokens, each[0].finish_reason) == ([], "length") for each in found.values()) and len(found) == 2
    assert engine.stats()["blocks_used"] == 0
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingOptions(max_new_tokens=0)


def test_others_go_on_while_a_long_prompt_is_told() -> None:
    engine = Engine(network("llama"), EngineOptions(max_num_batched_tokens=4, max_num_seqs=2, block_size=2))
    quick = engine.submit([3], SamplingOptions(max_new_tokens=8))
    engine.step()
    long = engine.submit([*STEM, *STEM], replace(TOLD, max_new_tokens=1))
    tokens = 0
    while True:
        outputs = engine.step()
        tokens += sum(len(output.tokens) for output in outputs if output.request == quick)
        if any(output.request == long for output in outputs):
            break
    assert tokens >= 6


def test_no_end_comes_before_the_least_length() -> None:
    model = network("llama")
    free = recomputed(model, STEM, SamplingOptions(max_new_tokens=8)).tokens
    stop = free[2]
    options = SamplingOptions(max_new_tokens=8, stop_ids=(stop,), min_new_tokens=5)
    ((found,),) = Engine(model, EngineOptions(prompt_lookup_tokens=2), stop_ids=[free[0]]).generate([STEM], options)
    assert not {stop, free[0]} & set(found.tokens[:5]) and len(found.tokens) > 5
    assert all(value > float("-inf") for value in found.logprobs)
    eager = replace(options, logit_bias={str(stop): 100.0})
    ((other,),) = Engine(model).generate([STEM], eager)
    assert len(other.tokens) == 6 and other.tokens[5] == stop not in other.tokens[:5]
    warm = replace(options, temperature=1.0, top_k=1)
    ((other,),) = Engine(model, stop_ids=[free[0]]).generate([STEM], warm)
    assert other.tokens[:6] == found.tokens[:6]
    with pytest.raises(ConfigError, match="min_new_tokens"):
        SamplingOptions(max_new_tokens=4, min_new_tokens=5)
    every = replace(options, stop_ids=tuple(range(model.geometry.vocab_size)))
    with pytest.raises(ConfigError, match="every token"):
        Engine(model).submit(STEM, every)


def test_the_engines_ends_can_be_ignored_and_the_requests_own_not() -> None:
    model = network("llama")
    free = recomputed(model, STEM, SamplingOptions(max_new_tokens=8)).tokens
    engine = Engine(model, stop_ids=[free[1]])
    ((found,),) = engine.generate([STEM], SamplingOptions(max_new_tokens=8, ignore_eos=True))
    assert found.tokens == free and found.finish_reason == "length"
    last = next(place for place, token in enumerate(free) if token == free[3])
    ((found,),) = engine.generate([STEM], SamplingOptions(max_new_tokens=8, ignore_eos=True, stop_ids=(free[3],)))
    assert found.tokens == free[: last + 1] and found.finish_reason == "stop"


def test_a_bias_is_made_once_a_text_and_named_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens it names and however long the text becomes."""
    made: list[int] = []
    bias = SamplingOptions.bias
    monkeypatch.setattr(
        SamplingOptions,
        "bias",
        lambda options, device: (made.append(len(options.logit_bias)), bias(options, device))[1],
    )
    model = network("llama")
    options = SamplingOptions(max_new_tokens=6, logit_bias={"3": 40.0, "4": 41.0, "5": -3.0}, temperature=1.0)
    samples = Engine(model).generate([STEM], options, num_samples=2)[0]
    assert made == [3] and {token for sample in samples for token in sample.tokens} <= {3, 4}
    for key in ("03", "-1", " 3", "٣"):
        with pytest.raises(ConfigError, match="logit_bias"):
            SamplingOptions(logit_bias={key: 1.0})
    with pytest.raises(ConfigError, match="unknown token"):
        Engine(model).submit(STEM, SamplingOptions(logit_bias={"99999": 1.0}))


def test_the_way_options_are_told_apart_costs_the_same_for_every_token() -> None:
    many = SamplingOptions(logit_bias={str(token): 0.5 for token in range(1024)})
    one, other = many.signature(), replace(many, seed=4).signature()
    assert one == other != SamplingOptions(logit_bias={"1": 0.5}).signature()
    # Texts keep their hashes; tuples find theirs anew, entry by entry.
    assert not any(isinstance(part, tuple) for part in one)  # type: ignore[attr-defined]


def test_a_row_of_few_logits_is_enough_for_any_number_of_alternatives() -> None:
    engine = Engine(network("llama"))
    request = engine.submit([1, 2], SamplingOptions(max_new_tokens=0, prompt_logprobs=10**6))
    told = by_sample(engine)[request, 0][0].prompt_logprobs
    assert told is not None and len(told[0].top_logprobs) == network("llama").geometry.vocab_size
    assert torch.tensor([value for _, value in told[0].top_logprobs]).exp().sum() == pytest.approx(1)
