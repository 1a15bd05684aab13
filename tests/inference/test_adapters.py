"""Adapters by name: each text of a batch has the bits that it has alone, and the text of the merged network."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.quantized_linear.reference import GROUP, dequantize, quantize
from kitforge.core.nn.decode_step import FusedDecodeStep
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.lora import LoraConfig, attach, merge_factors, row_norms
from kitforge.core.nn.quantized import quantize_linears
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.core.nn.networks import BLOOM, GLM, GPT2, LLAMA, MIXTRAL, PANGU_ALPHA, QWEN3_MOE, VOCAB, build
from tests.differential.drawn import WHOLE
from tests.inference import workload
from tests.inference.recomputation import alone, until_end

Factors = dict[str, tuple[Tensor, ...]]
DENSE: dict[str, FamilyConfig] = {"llama": LLAMA, "gpt2": GPT2, "bloom": BLOOM, "glm": GLM}
FAMILIES = DENSE | {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "pangu_alpha": PANGU_ALPHA}
ALL = ("query", "key", "value", "out", "gate", "up", "down")


@cache
def network(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return build(replace(FAMILIES[family], max_length=48), dtype=dtype).requires_grad_(False).eval()


def factors(model: nn.Module, seed: int, rank: int, targets: tuple[str, ...], *, is_dora: bool = False) -> Factors:
    """An adapter that changes what a network of random weights says."""
    noise, found = torch.Generator().manual_seed(seed), {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and path.split(".")[-1] in targets:
            rows, columns = layer.shape
            down, up = torch.randn(rank, columns, generator=noise), torch.randn(rows, rank, generator=noise)
            norms = row_norms(layer.dense_weight())
            magnitude = (norms * (1 + 0.2 * torch.rand(rows, generator=noise)),) if is_dora else ()
            found[path] = (down / columns**0.5, 0.3 * up / rank**0.5, *magnitude)
    return found


@cache
def adapters(family: str) -> dict[str, Factors]:
    model = network(family)
    return {
        "some": factors(model, 1, 4, ("query", "value")),
        "every": factors(model, 2, 7, ALL),
        "dora": factors(model, 3, 2, ("key", "up"), is_dora=True),
    }


def merged(model: Decoder, own: Mapping[str, tuple[Tensor, ...]]) -> Decoder:
    found = build(model.config, dtype=model.head_weight.dtype).requires_grad_(False).eval()
    found.load_state_dict(model.state_dict())
    for path, each in own.items():
        layer = found.get_submodule(path)
        assert isinstance(layer, Linear)
        layer.weight.copy_(merge_factors(layer.weight.double(), [tensor.double() for tensor in each], 1.0))
    return found


def prompts(number: int) -> list[list[int]]:
    chance = random.Random(number)
    return [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))] for _ in range(number)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", DENSE)
def test_every_text_has_the_bits_that_it_has_alone(family: str, dtype: torch.dtype) -> None:
    """Among texts of other adapters and of none, in chunks, with prefixes, drafts, preemption and cancellations. One of
    the base model has the bits of an engine without adapters."""
    model, names = network(family, dtype), [None, *adapters(family)]
    for seed in range(12) if WHOLE else (list(DENSE).index(family),):
        chance = random.Random(seed)
        wanted = [
            replace(each, options=replace(each.options, adapter=chance.choice(names)))
            for each in workload.requests(chance, model)
        ]
        engine = Engine(
            model, workload.engine_options(chance, model), stop_ids=[workload.STOP], adapters=adapters(family)
        )
        result = workload.serve(engine, wanted)
        for place, request in enumerate(wanted):
            for sample, got in enumerate(result.completions[place]):
                size = EngineOptions(max_num_seqs=1, prefix_cache=False)
                known = adapters(family) if request.options.adapter else None
                single = Engine(model, size, stop_ids=[workload.STOP], adapters=known)
                own = alone(single, request.prompt, request.options, f"{place}/{sample}" if sample else place)
                assert (got.tokens, got.logprobs) == (own.tokens[: len(got.tokens)], own.logprobs[: len(got.tokens)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_that_of_the_merged_network(family: str) -> None:
    """Eight in a batch, of every adapter in turn and of none."""
    model, known, texts = network(family), adapters(family), prompts(8)
    engine = Engine(model, EngineOptions(max_num_batched_tokens=16), adapters=known)
    names = [*known, None]
    found = {}
    for place, text in enumerate(texts):
        options = SamplingOptions(max_new_tokens=8, adapter=names[place % 4], prompt_logprobs=0)
        found[engine.submit(text, options)] = place, Completion(tokens=[], logprobs=[])
    firsts: dict[int, list[float]] = {}
    for output in until_end(engine):
        place, own = found[output.request]
        own.tokens += output.tokens
        own.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            firsts[place] = [each.logprob for each in output.prompt_logprobs]
    networks = [merged(model, known[name]) if name else model for name in names]
    for place, own in found.values():
        (score,) = Engine(networks[place % 4]).score([texts[place] + own.tokens])
        got = torch.tensor(firsts[place] + own.logprobs)
        assert torch.allclose(got, torch.tensor(score), atol=2e-4), (place, got - torch.tensor(score))
        base = torch.tensor(Engine(model).score([texts[place] + own.tokens])[0])
        assert (names[place % 4] is None) == torch.allclose(got, base, atol=2e-3)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_adapter_stands_on_a_quantized_model(kind: Literal["int8", "int4"]) -> None:
    """The text is that of the rounded weights, to which the update is added as it is."""
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, dim=64, mlp_dim=96, max_length=48)
    model = build(config, dtype=torch.float32).requires_grad_(False).eval()
    known, texts = {"every": factors(model, 2, 7, ALL)}, prompts(6)
    sizes = EngineOptions(quantization=kind)
    found = Engine(model, sizes, adapters=known).generate(texts, SamplingOptions(max_new_tokens=6, adapter="every"))
    for text, (got,) in zip(texts, found, strict=True):
        options = SamplingOptions(max_new_tokens=6, adapter="every")
        single = alone(Engine(model, sizes, adapters=known), text, options)
        assert (single.tokens, single.logprobs) == (got.tokens, got.logprobs)
    rounded, bits = merged(model, {}), (8, None) if kind == "int8" else (4, GROUP)
    for each in [rounded.head_weight, *(each.weight for each in rounded.modules() if isinstance(each, Linear))]:
        each.copy_(dequantize(*quantize(each, *bits)))
    for text, (got,) in zip(texts, found, strict=True):
        score = Engine(merged(rounded, known["every"])).score([[*text, *got.tokens]])[0]
        assert torch.allclose(torch.tensor(got.logprobs), torch.tensor(score[-6:]), atol=2e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_fused", [True, False])
def test_an_adapter_stands_on_weights_that_are_stored_quantized(
    bits: Literal[4, 8], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GGUF file, by the compiled step or module by module."""
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, dim=64, mlp_dim=96, max_length=48)
    model = build(config, dtype=torch.float32).requires_grad_(False).eval()
    known = {"every": factors(model, 2, 7, ALL), "dora": factors(model, 3, 2, ("value", "down"), is_dora=True)}
    quantize_linears(model, bits)
    dense = build(config, dtype=torch.float32).requires_grad_(False).eval()
    for path, layer in dense.named_modules():
        if isinstance(layer, Linear):
            layer.weight.copy_(cast(Linear, model.get_submodule(path)).dense_weight())
    if not is_fused:
        monkeypatch.setattr(FusedDecodeStep, "__call__", lambda *_: None)
    engine = Engine(model, adapters=known)
    for name in known:
        got = alone(engine, [1, 2, 3], SamplingOptions(max_new_tokens=9, adapter=name))
        wanted = Engine(merged(dense, known[name])).score([[1, 2, 3, *got.tokens]])[0][2:]
        assert torch.allclose(torch.tensor(got.logprobs), torch.tensor(wanted), atol=2e-4)


def test_cached_prefixes_are_of_the_weights_of_an_adapter_and_not_of_its_name() -> None:
    model, own = network("llama"), factors(network("llama"), 1, 4, ("key", "value"))
    # `scaled` differs from `own` in its scale alone, and `moved` in a layer's name.
    (first, pair), *rest = own.items()
    scaled = {path: (down, 2 * up) for path, (down, up) in own.items()}
    moved = {first.replace("key", "query"): (pair[0], pair[1].repeat(2, 1)), **dict(rest)}
    engine = Engine(model, adapters={"own": own, "again": own, "scaled": scaled, "moved": moved})
    prompt, hits = list(range(20)), []
    for name in (None, "own", "scaled", "moved", "again", "own", None):
        before = engine.stats()["prefix_cache_hits"]
        engine.generate([prompt], SamplingOptions(max_new_tokens=1, adapter=name))
        hits.append(engine.stats()["prefix_cache_hits"] - before)
    assert [each > 0 for each in hits] == [False] * 4 + [True] * 3


def test_weights_that_change_below_an_adapter_change_its_text() -> None:
    """Also the norms that DoRA divides by, which are kept."""
    known = adapters("llama")
    model = merged(network("llama"), {})
    engine = Engine(model, adapters=known)
    for name in ("every", "dora"):
        alone(engine, [1, 2, 3], SamplingOptions(max_new_tokens=4, adapter=name))
        for each in model.parameters():
            each.mul_(0.8)
        engine.update_weights(1)
        got = alone(engine, [1, 2, 3], SamplingOptions(max_new_tokens=9, adapter=name))
        wanted = Engine(merged(model, known[name])).score([[1, 2, 3, *got.tokens]])[0][2:]
        assert torch.allclose(torch.tensor(got.logprobs), torch.tensor(wanted), atol=2e-4)


def test_an_adapter_that_there_is_not_is_named() -> None:
    engine = Engine(network("llama"), adapters=adapters("llama"))
    with pytest.raises(ConfigError, match="no adapter 'evry'\n.*did you mean 'every'"):
        engine.generate([[1]], SamplingOptions(adapter="evry"))
    with pytest.raises(ConfigError, match="serve.adapters"):
        Engine(network("llama")).generate([[1]], SamplingOptions(adapter="every"))


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    model, own = network("llama"), dict(adapters("llama")["some"])
    path, (down, up) = next(iter(own.items()))
    wrong = {"narrow": {path: (down[:, 1:], up)}, "short": {path: (down, up[1:])}}
    wrong |= {name: {name: (down, up)} for name in ("embedding", "head", "blocks.0.mlp.experts.up")}
    for name, each in wrong.items():
        with pytest.raises(ModelError, match=f"the adapter '{name}' does not fit"):
            Engine(network("mixtral") if "experts" in name else model, adapters={name: each})
    trained = merged(model, {})
    attach(trained, "own", LoraConfig())
    with pytest.raises(ModelError, match="takes no adapters by name"):
        Engine(trained, adapters={"some": own})
