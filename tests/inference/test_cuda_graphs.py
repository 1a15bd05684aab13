"""Steps of fixed shapes give what other steps give. Without a GPU they run as they are, unrecorded: all but the replay
itself is tested here."""

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.foundation import device as devices
from kitforge.inference import cuda_graphs, model_runner
from kitforge.inference import engine as engines
from kitforge.inference.capacity import kv_bytes_per_token
from kitforge.inference.cuda_graphs import CudaGraphRunner, Sampler
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.paged_attention import PrefillBatch
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.scheduler import ScheduledTokens
from kitforge.inference.sequence import FinishReason, Sequence
from tests.core.nn.networks import CONFIGS, MIXTRAL, MIXTURES, build
from tests.inference import workload
from tests.inference.recomputation import network, recomputed, until_end

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
PAGED = EngineOptions(kv_layout="paged", block_size=4, max_num_seqs=5, max_num_batched_tokens=16)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """A device that can record; counts the texts of recorded steps."""
    seen = Counter[object]()
    run = CudaGraphRunner.run

    def watched(recorded: CudaGraphRunner, sequences: list[Sequence], num_steps: int, sample: Sampler) -> torch.Tensor:
        seen[len(sequences)] += 1
        seen["together"] += num_steps > 1
        return run(recorded, sequences, num_steps, sample)

    monkeypatch.setattr(devices, "can_record", lambda _: True)
    # How long a step takes here decides nothing.
    monkeypatch.setattr(engines, "LONG_STEP", 1e9)
    monkeypatch.setattr(cuda_graphs, "accepts_grouped_mm", lambda *_: True)
    monkeypatch.setattr(CudaGraphRunner, "run", watched)
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_steps_change_no_text(name: str, steps: Counter[object]) -> None:
    model = network(name)
    wanted = workload.requests(random.Random(4), model)
    workload.check(model, wanted, workload.serve(Engine(model, PAGED, stop_ids=[workload.STOP]), wanted))
    assert sum(steps.values()) > 3
    assert steps["together"] > 0


def as_texts(found: list[list[Completion]]) -> list[tuple[list[int], FinishReason | None]]:
    """What does not depend on the number of rows of a step by rounding."""
    return [(each.tokens, each.finish_reason) for samples in found for each in samples]


def assert_together_as_apart(model: Decoder, stops: Iterable[int], options: SamplingOptions) -> None:
    """With any of the stop tokens."""
    for stop in stops:
        one, other = (
            Engine(model, replace(PAGED, num_scheduler_steps=count), stop_ids=[stop]).generate(PROMPTS, options)
            for count in (1, 7)
        )
        assert as_texts(one) == as_texts(other)


def test_a_text_ends_at_its_stop_token_and_length_within_steps_that_run_together(steps: Counter[object]) -> None:
    model, options = network("llama"), SamplingOptions(max_new_tokens=11, seed=5)
    alone = [Engine(model, PAGED).generate([prompt], options, num_samples=2)[0] for prompt in PROMPTS]
    assert steps["together"] > 0
    assert_together_as_apart(model, {token for samples in alone for each in samples for token in each.tokens}, options)


# Of each field of the options, what a text is generated with.
FIELDS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 5},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "presence_penalty": {"presence_penalty": 4.0},
    "frequency_penalty": {"frequency_penalty": 3.0},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "suppress_tokens": {"suppress_tokens": tuple(range(0, 31, 2))},
    # 7 and 8 after any token.
    "bad_words": {"bad_words": tuple((first, token) for first in range(31) for token in (7, 8))},
    "ignored_settings": {"ignored_settings": ("top_k",)},
    "logit_bias": {"logit_bias": {"7": 0.5, "8": -3.0}},
    "stop_ids": {"stop_ids": (7, 8, 9)},
    "ignore_eos": {"ignore_eos": True},
    "min_new_tokens": {"min_new_tokens": 4, "temperature": 1.5},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "num_top_logprobs": {"num_top_logprobs": 2},
    "pooling": {"pooling": "mean"},
    "cache_salt": {"cache_salt": "a"},
    "seed": {"temperature": 1.0, "seed": 11},
}


@pytest.mark.parametrize("field", sorted({each.name for each in dataclasses.fields(SamplingOptions)} - {"adapter"}))
def test_steps_that_run_together_take_every_option_as_single_ones(field: str, steps: Counter[object]) -> None:
    model, options = network("llama"), SamplingOptions(**{"max_new_tokens": 11, **FIELDS[field]})
    # The fifth token of a text stops it, which is the first that may with `min_new_tokens`.
    free = Engine(model, PAGED).generate(PROMPTS, replace(options, ignore_eos=True, min_new_tokens=0))
    before = steps["together"]
    assert_together_as_apart(model, {samples[0].tokens[4] for samples in free}, options)
    # Penalties and words read the text so far, and alternatives the logits, so that their steps never run together.
    reads = options.needs_history or options.bad_words or options.num_top_logprobs
    assert (steps["together"] > before) == (not reads)


def test_a_prompt_of_one_token_is_embedded_in_no_recorded_step(steps: Counter[object]) -> None:
    engine = Engine(network("llama"), PAGED)
    engine.submit([7], SamplingOptions(max_new_tokens=3, pooling="last"))
    first, before = engine.step()[0], sum(steps.values())
    assert first.embedding is not None and first.embedding.isfinite().all() and before == 0
    assert all(output.embedding is None for output in until_end(engine))
    assert sum(steps.values()) > 0


def test_a_step_of_a_text_with_an_adapter_is_not_recorded(steps: Counter[object]) -> None:
    model = network("llama")
    layers = {path: each.shape for path, each in model.named_modules() if isinstance(each, Linear)}
    noise = {path: (torch.ones(1, columns), torch.ones(rows, 1)) for path, (rows, columns) in layers.items()}
    engine = Engine(model, PAGED, adapters={"a": noise})
    options = SamplingOptions(max_new_tokens=5, adapter="a")
    base = engine.generate([[1, 2, 3]], replace(options, adapter=None))
    before = sum(steps.values())
    assert engine.generate([[1, 2, 3]], options) != base and before == sum(steps.values()) > 0


def test_steps_that_run_together_need_no_room_behind_a_text(steps: Counter[object]) -> None:
    # Two blocks for one text and three for the other, and all of them are needed.
    tight = replace(PAGED, kv_cache_bytes=5 * 4 * kv_bytes_per_token(network("llama")), prefix_cache=False)
    crowded = Engine(network("llama"), tight)
    for count in (7, 11):
        crowded.submit([1], SamplingOptions(max_new_tokens=count, ignore_eos=True))
    found = [0, 0]
    for output in until_end(crowded):
        found[output.request] += len(output.tokens)
    # After the step that reads the prompts: four, four and two.
    assert found == [7, 11] and steps["together"] == 3 and crowded.stats()["preemptions"] == 0


def test_a_text_without_new_tokens_takes_none_between_others(steps: Counter[object]) -> None:
    asked, options = Engine(network("llama"), PAGED), SamplingOptions(max_new_tokens=9, ignore_eos=True)
    asked.submit([5, 6], options)
    outputs = asked.step()
    asked.submit([1], SamplingOptions(max_new_tokens=0, prompt_logprobs=0))
    asked.submit([8], options)
    outputs += until_end(asked)
    texts: list[list[int]] = [[], [], []]
    for output in outputs:
        texts[output.request] += output.tokens
    alone = [Engine(network("llama"), PAGED).generate([prompt], options)[0][0].tokens for prompt in ([5, 6], [8])]
    assert texts == [alone[0], [], alone[1]] and steps["together"] > 0


def test_alternatives_of_each_token_are_read_step_by_step(steps: Counter[object]) -> None:
    asked = Engine(network("llama"), PAGED)
    asked.submit([1, 2, 3], SamplingOptions(max_new_tokens=6, ignore_eos=True, num_top_logprobs=2))
    assert [len(top) for output in until_end(asked) for top in output.top_logprobs] == [2] * 6
    assert steps["together"] == 0


def test_a_text_that_has_ended_writes_no_keys_in_the_steps_of_others(steps: Counter[object]) -> None:
    model, kept = network("llama"), Engine(network("llama"), PAGED)
    short, long = (SamplingOptions(max_new_tokens=count, ignore_eos=True) for count in (8, 12))
    # Its last token would be the first of a block that it does not have.
    kept.submit([1], short, key="short")
    kept.submit([2], long, key="long")
    tokens = [1, *(token for output in until_end(kept) if output.request == 0 for token in output.tokens)]
    (again,) = kept.generate([tokens], SamplingOptions(max_new_tokens=3))[0]
    alone = recomputed(model, tokens, SamplingOptions(max_new_tokens=3), 0, [])
    assert steps["together"] > 0 and kept.stats()["prefix_cache_hits"] == 8
    assert again.logprobs == pytest.approx(alone.logprobs, abs=workload.TOLERANCE)


def test_a_text_that_diverges_within_steps_that_run_together_ends_where_it_ends_alone(
    steps: Counter[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(network("llama"))
    prompts, options = [[1, 2, 3], [4, 5]], SamplingOptions(max_new_tokens=9, ignore_eos=True)
    fifth = Engine(model, PAGED).generate(prompts, options)[0][0].tokens[4]
    with torch.no_grad():
        model.embedding.weight[fifth] = torch.nan
    one, other = (
        Engine(model, replace(PAGED, num_scheduler_steps=count)).generate(prompts, options) for count in (1, 8)
    )
    assert as_texts(one) == as_texts(other) and one[0][0].finish_reason == "diverged"


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_read_in_one_call_change_no_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU in half precision; here the call computes under a dense mask."""
    sizes: list[int] = []
    batch = ModelRunner._prefill_batch

    def watched(runner: ModelRunner, works: list[ScheduledTokens], first: int, device: torch.device) -> PrefillBatch:
        sizes.append(len(works))
        return batch(runner, works, first, device)

    monkeypatch.setattr(model_runner, "takes_packed", lambda *_: True)
    monkeypatch.setattr(ModelRunner, "_prefill_batch", watched)
    monkeypatch.setattr(ModelRunner, "_run_fused", lambda *_: None)
    model = network(name)
    base, options = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], SamplingOptions(max_new_tokens=6, seed=2)
    prompts = [[*base[: 3 * number], number, number] for number in range(4)]
    runs = Engine(model, replace(PAGED, max_num_batched_tokens=24, prompt_lookup_tokens=2))
    # The second time, beginnings are in the cache.
    for _ in range(2):
        for number, (found,) in enumerate(runs.generate(prompts, options)):
            alone = recomputed(model, prompts[number], options, number, [])
            assert found.tokens == alone.tokens
            assert found.logprobs == pytest.approx(alone.logprobs, abs=workload.TOLERANCE)
    assert max(sizes) > 2


def test_rows_that_fill_up_a_step_write_where_nobody_reads(steps: Counter[object]) -> None:
    engine = Engine(network("llama"), PAGED)
    engine.generate([[1, 2, 3], [4, 5], [6]], SamplingOptions(max_new_tokens=6))
    keys, _ = engine._runner.cache._slabs[0]
    assert steps[3] > 0
    assert keys[engine._runner.cache.spare_slot :].abs().sum() > 0


def test_weights_that_moved_are_found(steps: Counter[object]) -> None:
    engine = Engine(network("llama"), PAGED)
    engine.generate([[1, 2, 3]], SamplingOptions(max_new_tokens=3))
    recorded = engine._runner._cuda_graphs
    assert recorded is not None and recorded._graphs
    engine.update_weights(1)
    assert recorded._graphs
    recorded._weight_addresses = ()
    engine.update_weights(2)
    assert not recorded._graphs


def test_steps_whose_experts_wait_for_the_host_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "can_record", lambda _: True)
    assert Engine(network("llama"), PAGED)._runner._cuda_graphs is not None
    for name in MIXTURES:
        assert Engine(network(name), PAGED)._runner._cuda_graphs is None


@pytest.mark.gpu
def test_a_gpu_records_experts_in_bfloat16() -> None:
    config = replace(MIXTRAL, mlp_dim=32, max_length=64)
    model = build(config, dtype=torch.bfloat16).to(torch.accelerator.current_accelerator()).eval()
    assert_replayed(model.requires_grad_(False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "pangu_alpha", "llama", "window", "longrope", *MIXTURES])
def test_a_gpu_replays_what_it_would_compute(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(network(name, torch.float32)).to(torch.accelerator.current_accelerator(), dtype)
    assert_replayed(model)


def assert_replayed(model: Decoder) -> None:
    """The same texts with recorded steps and without."""
    options = SamplingOptions(max_new_tokens=16)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [5, 8, 9]]  # a power of two: no row is added
    recorded, plain = (
        Engine(model, EngineOptions(cuda_graphs=flag)).generate(prompts, options) for flag in (True, False)
    )
    assert [sample.tokens for (sample,) in recorded] == [sample.tokens for (sample,) in plain]
