"""What an engine promises those who use it: ends, priorities, cancellation, weights, errors."""

import copy
import itertools
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.log import noting_warnings
from kitforge.inference.block_manager import BlockManager
from kitforge.inference.capacity import kv_bytes_per_token
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.logprobs import eval_mode
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.scheduler import prompt_lookup
from tests.inference.recomputation import LENGTH, logits_of, network, recomputed, until_end

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
EIGHT = SamplingOptions(max_new_tokens=8)


def tokens_of(completions: list[list[Completion]]) -> list[list[int]]:
    return [sample.tokens for samples in completions for sample in samples]


def test_each_text_ends_with_any_of_the_stop_tokens_of_engine_or_request() -> None:
    model = network("gpt2")
    free = tokens_of(Engine(model).generate(PROMPTS, EIGHT))
    stops = {free[0][3], free[1][5]}
    own = SamplingOptions(max_new_tokens=8, stop_ids=(free[1][5],))
    for samples, whole in zip(Engine(model, stop_ids=[free[0][3]]).generate(PROMPTS, own), free, strict=True):
        place = next((place for place, token in enumerate(whole) if token in stops), len(whole))
        assert samples[0].content == whole[:place]
        assert samples[0].tokens == whole[: place + 1]
        assert samples[0].finish_reason == ("length" if place == len(whole) else "stop")


def test_samples_of_one_prompt_differ_and_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(20))
    sizes: list[int] = []
    run = ModelRunner.run

    def watched(runner: ModelRunner, works: list) -> torch.Tensor:  # type: ignore[type-arg]
        sizes.append(sum(work.num_tokens for work in works))
        return run(runner, works)

    monkeypatch.setattr(ModelRunner, "run", watched)
    options = SamplingOptions(max_new_tokens=6, temperature=1.0)
    outputs = tokens_of(Engine(network("llama")).generate([prompt], options, num_samples=4))
    assert len({tuple(output) for output in outputs}) == 4
    assert sizes[:3] == [20, 4, 4]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3), 2)))
def test_samples_that_are_cancelled_before_their_prompt_is_read_leave_the_others_theirs(order: tuple[int, ...]) -> None:
    options = SamplingOptions(max_new_tokens=8, temperature=1.0)
    alone = [sample.tokens for sample in Engine(network("llama")).generate(PROMPTS[:1], options, num_samples=3)[0]]
    engine = Engine(network("llama"))
    request = engine.submit(PROMPTS[0], options, num_samples=3, key=0)
    for sample in order:
        engine.cancel(request, sample)
    found: dict[int, list[int]] = {sample: [] for sample in range(3)}
    ends: dict[int, str | None] = {}
    for output in until_end(engine):
        found[output.sample] += output.tokens
        ends[output.sample] = output.finish_reason
    left = next(sample for sample in range(3) if sample not in order)
    assert found == {sample: alone[sample] if sample == left else [] for sample in range(3)}
    assert ends == {sample: "length" if sample == left else "cancelled" for sample in range(3)}
    stats = engine.stats()
    assert stats["blocks_used"] == stats["running"] == stats["waiting"] == 0


def test_higher_priority_goes_first_and_takes_the_place_of_lower() -> None:
    engine = Engine(network("llama"), EngineOptions(max_num_seqs=1, block_size=4))
    slow = engine.submit(PROMPTS[0], EIGHT)
    engine.step()
    later = engine.submit(PROMPTS[1], EIGHT, priority=1)
    urgent = engine.submit(PROMPTS[2], EIGHT, priority=2)
    ends = [output.request for output in until_end(engine) if output.finish_reason]
    assert ends == [urgent, later, slow]
    assert engine.stats()["preemptions"] == 1


def test_what_is_cancelled_says_so_once_and_leaves_nothing_behind() -> None:
    engine = Engine(network("llama"), EngineOptions(max_num_seqs=2))
    requests = [engine.submit(prompt, EIGHT, num_samples=2) for prompt in PROMPTS]
    engine.step()
    engine.step()
    engine.cancel(requests[0])
    engine.cancel(requests[0])
    engine.cancel(requests[2])
    ends = [(output.request, output.sample, output.finish_reason) for output in until_end(engine)]
    cancelled = [end for end in ends if end[2] == "cancelled"]
    assert cancelled == [(request, sample, "cancelled") for request in (requests[0], requests[2]) for sample in (0, 1)]
    assert [end for end in ends if end[2] == "length"] == [(requests[1], 0, "length"), (requests[1], 1, "length")]
    assert engine.stats()["blocks_used"] == 0


def test_samples_outlive_the_one_that_reads_their_prompt() -> None:
    model = network("llama")
    engine = Engine(model, EngineOptions(max_num_batched_tokens=16, max_num_seqs=4))
    prompt = list(range(25))
    request = engine.submit(prompt, SamplingOptions(max_new_tokens=5, temperature=1.0), num_samples=3, key=0)
    engine.step()
    engine.cancel(request, 0)
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for output in until_end(engine):
        texts[output.sample] += output.tokens
    options = SamplingOptions(max_new_tokens=5, temperature=1.0)
    assert texts == {0: []} | {sample: recomputed(model, prompt, options, f"0/{sample}").tokens for sample in (1, 2)}


def changed(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.8)


def test_new_weights_leave_nothing_of_the_old_ones() -> None:
    model = copy.deepcopy(network("llama"))
    engine = Engine(model, EngineOptions(block_size=2))
    engine.generate(PROMPTS, EIGHT)
    changed(model)
    engine.update_weights(1)
    stale, fresh = (each.generate(PROMPTS, EIGHT) for each in (engine, Engine(model, EngineOptions(block_size=2))))
    for (one,), (other,) in zip(stale, fresh, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)


def test_int8_copies_of_old_weights_are_made_anew() -> None:
    model = copy.deepcopy(network("llama")).float()
    engine = Engine(model, EngineOptions(quantization="int8"))
    engine.generate(PROMPTS, EIGHT)
    changed(model)
    engine.update_weights(1)
    assert engine.generate(PROMPTS, EIGHT) == Engine(model, EngineOptions(quantization="int8")).generate(PROMPTS, EIGHT)


def test_texts_under_way_go_on_with_the_new_weights() -> None:
    model = copy.deepcopy(network("llama"))
    engine = Engine(model)
    request = engine.submit(PROMPTS[0], EIGHT)
    before = [token for _ in range(3) for output in engine.step() for token in output.tokens]
    changed(model)
    engine.update_weights(7)
    outputs = list(until_end(engine))
    rest = recomputed(model, PROMPTS[0] + before, SamplingOptions(max_new_tokens=5))
    assert [token for output in outputs for token in output.tokens] == rest.tokens
    assert {(output.request, output.version) for output in outputs} == {(request, 7)}


def test_a_second_prompt_reads_only_what_is_new() -> None:
    engine = Engine(network("llama"), EngineOptions(block_size=4))
    options = SamplingOptions(max_new_tokens=1)
    engine.generate([list(range(30))], options)
    sizes: list[int] = []
    admit = BlockManager.admit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "admit", lambda *args: (admit(*args), sizes.append(args[1].num_cached))[0])
        engine.generate([list(range(30)), [*range(17), 30], [30, *range(9)]], options)
    assert sizes == [28, 16, 0]


def test_the_models_mode_is_put_back_and_weights_are_not_copied() -> None:
    model = copy.deepcopy(network("llama")).train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    engine = Engine(model)
    engine.generate(PROMPTS, EIGHT)
    engine.score(PROMPTS)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()} == before


class Witness(nn.Module):
    """Tells which modes are set through its own method."""

    told: list[bool]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.told.append(value)
        super().__setattr__(name, value)


def test_the_mode_of_modules_may_change_between_steps() -> None:
    witness = Witness()
    witness.told = []
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), witness), nn.Dropout().eval())
    for frozen in (model[0], model[1], None):
        before, told = [each.training for each in model.modules()], len(witness.told)
        with pytest.raises(ZeroDivisionError), eval_mode(model):
            assert not any(each.training for each in model.modules())
            raise ZeroDivisionError
        assert [each.training for each in model.modules()] == before
        assert witness.told[told:] == ([False, True] if before[4] else [])
        if frozen is not None:
            frozen.eval()


def test_no_prompts_give_no_texts() -> None:
    assert Engine(network("llama")).generate([], EIGHT) == []
    assert Engine(network("llama")).step() == []
    assert Engine(network("llama")).score([]) == []


def test_generating_leaves_others_their_outputs() -> None:
    engine = Engine(network("llama"))
    request = engine.submit(PROMPTS[0], EIGHT)
    engine.generate(PROMPTS[1:], EIGHT)
    tokens = [token for output in until_end(engine) if output.request == request for token in output.tokens]
    assert tokens == recomputed(network("llama"), PROMPTS[0], EIGHT).tokens


def test_bad_prompts_are_refused_and_harm_no_other() -> None:
    engine = Engine(network("llama"))
    request = engine.submit(PROMPTS[0], EIGHT)
    unknown = "unknown token(.|\n)*"
    for prompt, words in (([], "a prompt is empty"), ([0, 99], f"{unknown}99"), ([-1], f"{unknown}-1")):
        with pytest.raises(DataError, match=words):
            engine.submit(prompt, EIGHT)
    with pytest.raises(ConfigError, match=rf"5 prompt tokens \+ 36 new ones = 41(.|\n)*max_length={LENGTH}"):
        engine.submit(PROMPTS[0], SamplingOptions(max_new_tokens=36))
    assert {output.request for output in until_end(engine)} == {request}


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells memory as Linux does")
def test_room_that_no_text_has_reached_takes_no_memory() -> None:
    before = resident()
    engine = Engine(network("gpt2"), EngineOptions(kv_cache_bytes=2**28))
    engine.generate(PROMPTS, EIGHT)
    assert engine.stats()["cache_bytes"] >= 2**28
    assert resident() - before < 2**27


def test_a_text_larger_than_the_memory_is_refused() -> None:
    block = 2 * 2 * 2 * 6 * 8 * 4
    engine = Engine(network("llama"), EngineOptions(kv_cache_bytes=3 * block, block_size=4))
    engine.generate([[1] * 4], EIGHT)
    with pytest.raises(ConfigError, match=r"5 prompt tokens \+ 8 new ones = 13(.|\n)*at most 12 tokens"):
        engine.submit([1] * 5, EIGHT)
    with pytest.raises(ConfigError, match="smaller than one block"):
        Engine(network("llama"), EngineOptions(kv_cache_bytes=block - 1, block_size=4))


@pytest.mark.parametrize(
    "choices",
    [
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"kv_cache_bytes": 0},
        {"prompt_lookup_tokens": -1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4},
    ],
)
def test_options_out_of_range_are_refused(choices: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"inference.engine.{next(iter(choices))}"):
        EngineOptions(**choices)


def test_as_many_texts_run_at_once_as_the_cache_and_the_processor_have_room_for() -> None:
    model, token = network("llama"), kv_bytes_per_token(network("llama"))
    assert Engine(model).max_num_seqs == 64
    assert Engine(model, EngineOptions(max_num_batched_tokens=9)).max_num_seqs == 9
    length = model.geometry.max_length
    assert Engine(model, EngineOptions(kv_cache_bytes=3 * length * token, block_size=4)).max_num_seqs == 3
    assert Engine(model, EngineOptions(kv_cache_bytes=4 * token, block_size=4)).max_num_seqs == 1
    engine = Engine(model)
    for _ in range(65):
        engine.submit([1], EIGHT)
    engine.step()
    assert engine.stats()["running"] == 64


def test_more_texts_at_once_than_the_cache_has_blocks_are_refused() -> None:
    token = kv_bytes_per_token(network("llama"))
    with pytest.raises(ConfigError, match=r"max_num_seqs=6(.|\n)*at most 5: the cache holds 5 blocks(.|\n)*lower"):
        Engine(network("llama"), EngineOptions(kv_cache_bytes=20 * token, block_size=4, max_num_seqs=6))
    Engine(network("llama"), EngineOptions(kv_cache_bytes=20 * token, block_size=4, max_num_seqs=5))


def test_a_guess_is_what_followed_the_longest_ending_last_time() -> None:
    assert prompt_lookup([1, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3], 2) == [8, 5]
    assert prompt_lookup([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], 3) == [9, 5, 2]
    assert prompt_lookup([4, 4], 3) == [4]
    assert prompt_lookup([1, 2, 3], 3) == prompt_lookup([1], 3) == prompt_lookup([4, 4], 0) == []


def test_guesses_that_come_true_save_steps() -> None:
    model, options = network("llama"), SamplingOptions(max_new_tokens=24, repetition_penalty=0.2)
    engines = [Engine(model, EngineOptions(prompt_lookup_tokens=guess)) for guess in (0, 4)]
    plain, guessed = (tokens_of(engine.generate(PROMPTS, options)) for engine in engines)
    assert plain == guessed
    assert engines[1].stats()["steps"] < engines[0].stats()["steps"] * 0.7


@pytest.mark.parametrize("speculation", [0, 3])
def test_with_every_token_come_the_most_likely_ones_of_a_plain_forward_pass(speculation: int) -> None:
    model = network("llama")
    engine = Engine(model, EngineOptions(prompt_lookup_tokens=speculation))
    wanted = [engine.submit(prompt * 3, replace(EIGHT, num_top_logprobs=place)) for place, prompt in enumerate(PROMPTS)]
    found: dict[int, tuple[list[int], list[list[tuple[int, float]]]]] = {request: ([], []) for request in wanted}
    for output in until_end(engine):
        found[output.request][0].extend(output.tokens)
        found[output.request][1].extend(output.top_logprobs)
    for place, request in enumerate(wanted):
        tokens, told = found[request]
        assert list(map(len, told)) == [place] * 8
        for read, others in enumerate(told):
            text = [*PROMPTS[place] * 3, *tokens[:read]]
            logprobs = torch.log_softmax(logits_of(model, text, len(text))[-1], dim=-1).tolist()
            order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:place]
            assert [token for token, _ in others] == order
            assert [value for _, value in others] == pytest.approx([logprobs[token] for token in order], abs=1e-10)


@pytest.mark.parametrize(("dtype", "is_told"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_dtype_without_units_is_told(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_told: bool) -> None:
    monkeypatch.setitem(NATIVE_DTYPES, torch.bfloat16, False)
    with noting_warnings() as texts:
        Engine(network("llama", dtype), EngineOptions(max_num_seqs=1))
    assert any("no bfloat16 units" in text for text in texts) == is_told
