"""Every text equals itself alone, recomputed without a cache, whatever else the engine does meanwhile."""

import os
import random
from collections import Counter

import pytest
import torch

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.inference.engine import Engine
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.paged_attention import AttentionSegment, KeyValueCache
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.scheduler import ScheduledTokens
from tests.core.nn.networks import CONFIGS, VOCAB
from tests.inference import workload
from tests.inference.recomputation import logits_of, network, recomputed

WHOLE = "KITFORGE_PROVE" in os.environ
# The last one writes to a block that another text reads.
SEEDS = range(200 if WHOLE else 4)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("name", CONFIGS)
def test_every_text_of_a_workload_is_the_one_it_is_alone(name: str) -> None:
    """Three workloads of the plain LLaMA, one of each other network in the gate: what a workload reaches depends on its
    seed, and what a network does with it on its kind of attention, norm and experts."""
    model = network(name)
    for seed in SEEDS if WHOLE or name == "llama" else [list(CONFIGS).index(name) % len(SEEDS)]:
        workload.check(model, *workload.run(model, seed))


def test_the_workloads_reach_what_they_are_meant_to_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption, copies of shared blocks, texts that lie apart, all kinds of attention, and every kind of end."""
    model, seen = network("llama"), Counter[str]()
    copy, parts = KeyValueCache.copy, ModelRunner._attention_segments

    def watched_copy(cache: KeyValueCache, copies: dict[int, int]) -> None:
        seen.update(["copies"])
        copy(cache, copies)

    def watched_parts(
        runner: ModelRunner, works: list[ScheduledTokens], device: torch.device
    ) -> list[AttentionSegment]:
        found = parts(runner, works, device)
        seen.update(type(part).__name__ for part in found)
        seen.update("apart" for work in works if not work.sequence.is_consecutive)
        seen.update("drafts" for work in works if work.draft_tokens)
        return found

    monkeypatch.setattr(KeyValueCache, "copy", watched_copy)
    monkeypatch.setattr(ModelRunner, "_attention_segments", watched_parts)
    for seed in SEEDS:
        result = workload.run(model, seed)[1]
        seen["preemptions"] += result.stats["preemptions"]
        seen.update(str(each.finish_reason) for samples in result.completions for each in samples)
    wanted = [
        "copies",
        "PrefillSpan",
        "DecodeBatch",
        "PagedBatch",
        "apart",
        "drafts",
        "preemptions",
        "stop",
        "length",
        "cancelled",
    ]
    assert all(seen[kind] > 0 for kind in wanted), seen


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_those_of_the_trainers_forward_pass(name: str) -> None:
    model = network(name, torch.float32)
    limit = model.geometry.max_length
    options = SamplingOptions(max_new_tokens=limit // 2, temperature=1.0)
    prompts = [[place + 1] * (1 + place % (limit // 2)) for place in range(6)]
    completions = Engine(model, EngineOptions(block_size=4, max_num_batched_tokens=16)).generate(prompts, options)
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        final_length = len(prompt) + options.max_new_tokens
        logprobs = logits_of(model, prompt + completion.tokens, final_length).log_softmax(-1)
        places = torch.arange(len(prompt), final_length) - 1
        wanted = logprobs[places, torch.tensor(completion.tokens)]
        # Rounding of numbers up to 4 in fp32, 16 times.
        assert float((wanted - torch.tensor(completion.logprobs)).abs().max()) < 16 * 2**-22


def test_steps_ask_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for prompts, nor where a text's blocks lie apart, nor where its guesses are verified."""
    model, lengths = network("llama", torch.float32), []
    hidden = Decoder.hidden

    def watched(own: Decoder, tokens: torch.Tensor, context: Context) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return hidden(own, tokens, context)

    monkeypatch.setattr(Decoder, "hidden", watched)
    options = EngineOptions(kv_layout="paged", block_size=2, prompt_lookup_tokens=2)
    for each in (EngineOptions(), options):
        Engine(model, each).generate([[3, 1, 4], [3, 1, 4, 1, 5]], SamplingOptions(max_new_tokens=9))
    assert lengths == []
    Engine(network("llama", torch.float64)).generate([[3, 1, 4]], SamplingOptions(max_new_tokens=1))
    assert lengths == [3]


@pytest.mark.parametrize("name", CONFIGS)
def test_given_texts_are_scored_like_one_by_one(name: str) -> None:
    model = network(name)
    limit = model.geometry.max_length
    chance = random.Random(3)
    texts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (2, limit, 1, 3, limit // 2, 3)]
    scores = Engine(model, EngineOptions(max_num_batched_tokens=64)).score(texts)
    for text, got in zip(texts, scores, strict=True):
        logprobs = logits_of(model, text, len(text)).log_softmax(-1)
        wanted = [float(logprobs[place, token]) for place, token in enumerate(text[1:])]
        assert got == pytest.approx(wanted, abs=1e-10)


def test_a_step_that_fails_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = network("llama"), SamplingOptions(max_new_tokens=9)
    engine = Engine(model, EngineOptions(block_size=2))
    prompts, runs = [[3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9]], 0
    run = ModelRunner.run

    def failing(runner: ModelRunner, works: list[ScheduledTokens]) -> torch.Tensor:
        nonlocal runs
        runs += 1
        if runs % 2:
            raise RuntimeError("out of memory")
        return run(runner, works)

    monkeypatch.setattr(ModelRunner, "run", failing)
    requests = [engine.submit(prompt, options, key=0) for prompt in prompts]
    tokens: dict[int, list[int]] = {request: [] for request in requests}
    left = engine.submit(prompts[0], options)
    engine.cancel(left)
    ends: dict[int, str | None] = {}
    while engine.has_work:
        try:
            for output in engine.step():
                tokens.setdefault(output.request, []).extend(output.tokens)
                ends[output.request] = output.finish_reason
        except RuntimeError:
            continue
    # What is told of one text waits for a step that succeeds.
    assert tokens.pop(left) == [] and ends[left] == "cancelled"
    assert list(tokens.values()) == [recomputed(model, prompt, options).tokens for prompt in prompts]
