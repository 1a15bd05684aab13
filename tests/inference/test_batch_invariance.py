"""In fp32 and in bfloat16 a text has the bits that it has alone: whatever is batched with it, however it is chunked."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.foundation.errors import ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.core.nn.networks import BLOOM, GLM, GPT2, LLAMA, VOCAB, build
from tests.differential.drawn import WHOLE
from tests.inference import workload
from tests.inference.recomputation import alone

# Longer than a block of keys that attention reads at once.
LENGTH = 72
FAMILIES: dict[str, FamilyConfig] = {
    "llama": LLAMA,
    "llama_tied": replace(LLAMA, num_heads=6, num_kv_heads=1, tie_embeddings=True, dim=48, mlp_dim=80),
    "gpt2": GPT2,
    "bloom": BLOOM,
    "glm": GLM,
    "qwen3": replace(LLAMA, qk_norm=True, sliding_window=37, window_layers=(1,)),
}
DTYPES = [torch.float32, torch.bfloat16]
NUM_SEEDS = 6


@cache
def network(family: str, dtype: torch.dtype) -> Decoder:
    return build(replace(FAMILIES[family], max_length=LENGTH), dtype=dtype).requires_grad_(False).eval()


@pytest.fixture
def autocast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a rollout in bf16, on a processor that has its products as far as dispatch knows."""
    monkeypatch.setitem(NATIVE_DTYPES, torch.bfloat16, True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield


@pytest.mark.prove
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_a_schedule_has_the_bits_that_it_has_alone(family: str, dtype: torch.dtype) -> None:
    """Prefixes, chunks, cancellations, preemption, penalties, seeds and drafts, as the workload mixes them."""
    number = list(FAMILIES).index(family)
    # Every seed meets every dtype; the plain LLaMA, and in `make prove` every network, meets all.
    seeds = range(NUM_SEEDS) if WHOLE or family == "llama" else (number % NUM_SEEDS, (number + 3) % NUM_SEEDS)
    have_their_own_bits(network(family, dtype), seeds)


@pytest.mark.prove
@pytest.mark.parametrize(("family", "seeds"), [("llama", (0, 4)), ("bloom", (3,))])
@pytest.mark.usefixtures("autocast")
def test_so_it_has_in_a_rollout_of_weights_in_fp32(family: str, seeds: tuple[int, ...]) -> None:
    have_their_own_bits(network(family, torch.float32), range(NUM_SEEDS) if WHOLE else seeds)


def have_their_own_bits(model: Decoder, seeds: Iterable[int] = range(NUM_SEEDS)) -> None:
    for seed in seeds:
        wanted, result = workload.run(model, seed)
        for place, request in enumerate(wanted):
            for sample, got in enumerate(result.completions[place]):
                key = place if sample == 0 else f"{place}/{sample}"
                sizes = EngineOptions(max_num_seqs=1, prefix_cache=False)
                own = alone(Engine(model, sizes, stop_ids=[workload.STOP]), request.prompt, request.options, key)
                size = len(got.tokens)
                assert (got.tokens, got.logprobs) == (own.tokens[:size], own.logprobs[:size])
                assert got.finish_reason == "cancelled" or size == len(own.tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_bits_of_its_decoding(family: str, dtype: torch.dtype) -> None:
    """In chunks of one token, of 16 and of 512; so do those of a prefix that is cached."""
    model, chance = network(family, dtype), random.Random(2)
    prompt = [chance.randrange(VOCAB) for _ in range(LENGTH - 6)]
    options = SamplingOptions(max_new_tokens=6, temperature=0.7, seed=4)
    found = []
    for size in (1, 16, 512):
        for prefix_cache in (False, True):
            sizes = EngineOptions(max_num_batched_tokens=size, max_num_seqs=1, prefix_cache=prefix_cache, block_size=8)
            engine = Engine(model, sizes)
            found += [engine.generate([prompt], options)[0][0] for _ in range(2)]
            assert engine.stats()["prefix_cache_hits"] == (64 if prefix_cache else 0)
    assert all((each.tokens, each.logprobs) == (found[0].tokens, found[0].logprobs) for each in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crowd_in_bfloat16_says_what_each_says_alone(family: str) -> None:
    model, chance = network(family, torch.bfloat16), random.Random(3)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))] for _ in range(64)]
    options = SamplingOptions(max_new_tokens=9)
    crowd = Engine(model, EngineOptions(max_num_seqs=64)).generate(prompts, options)
    one = Engine(model, EngineOptions(max_num_seqs=1)).generate(prompts, options)
    assert [each[0].tokens for each in crowd] == [each[0].tokens for each in one]
    assert [each[0].logprobs for each in crowd] == [each[0].logprobs for each in one]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_in_bfloat16_are_those_of_a_forward_pass_to_its_rounding(family: str) -> None:
    """No further from the exact ones than those of the trainer's own forward pass, by more than a half."""
    model, chance = network(family, torch.bfloat16), random.Random(5)
    exact = build(replace(FAMILIES[family], max_length=LENGTH), dtype=torch.bfloat16).double()
    prompts = [[chance.randrange(VOCAB) for _ in range(20)] for _ in range(8)]
    completions = Engine(model).generate(prompts, SamplingOptions(max_new_tokens=40, temperature=1.0))
    sampled, trained = [], []
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt + completion.tokens])
        targets, places = torch.tensor(completion.tokens), slice(len(prompt) - 1, -1)
        with torch.no_grad():
            true, own = (
                net(tokens)[0, places].double().log_softmax(-1).gather(1, targets.unsqueeze(1))[:, 0]
                for net in (exact, model)
            )
        sampled.append(torch.tensor(completion.logprobs) - true)
        trained.append(own - true)
    assert torch.cat(sampled).norm() < 1.5 * torch.cat(trained).norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_texts_do_not_depend_on_their_neighbours_either(
    kind: Literal["int8", "int4"], dtype: torch.dtype
) -> None:
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, dim=64, mlp_dim=96, max_length=LENGTH)
    model, chance = build(config, dtype=dtype).requires_grad_(False).eval(), random.Random(3)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))] for _ in range(20)]
    options, found = SamplingOptions(max_new_tokens=9, temperature=0.9), []
    for number, size in ((20, 512), (1, 16)):
        engine = Engine(model, EngineOptions(max_num_seqs=number, max_num_batched_tokens=size, quantization=kind))
        found.append([(each[0].tokens, each[0].logprobs) for each in engine.generate(prompts, options)])
    assert found[0] == found[1]
    plain = Engine(model).generate(prompts, options)
    assert [logprobs for _, logprobs in found[0]] != [each[0].logprobs for each in plain]


def test_int4_of_widths_that_no_group_divides_is_refused() -> None:
    model = network("gpt2", torch.bfloat16)
    with pytest.raises(ModelError, match=r"blocks.0(.|\n)*24 features, no multiple of 32|head with 24 features"):
        Engine(model, EngineOptions(quantization="int4"))
