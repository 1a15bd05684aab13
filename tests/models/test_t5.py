"""T5 of both versions: what `transformers` computes, packed pairs, the cache, and folders in and out."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5Attention

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.context import Context, DropoutKey, EncoderInput
from kitforge.core.nn.encoder_decoder import DecoderCache, EncoderDecoder
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.positions import Relative, RelativeBias
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.models import loading
from kitforge.models.catalog import config_of, converter_of_type
from kitforge.models.t5.model import T5Config
from tests.models.test_parity import exact

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "first": {},
    "v1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "more_decoder_layers": {"num_decoder_layers": 3},
}
TINY = T5Config(
    vocab_size=VOCAB,
    dim=24,
    num_layers=2,
    num_heads=3,
    head_dim=6,
    mlp_dim=40,
    num_buckets=8,
    max_distance=12,
    tie_embeddings=False,
    activation="geglu",
)


def peer(name: str, folder: Path) -> Any:
    """A network of theirs with every parameter off its initial value, written to the folder."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES | VARIANTS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3).add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def tiny(level: CompileLevel = "O1") -> EncoderDecoder:
    """A float64 network of ours with every parameter off its initial value."""
    model = EncoderDecoder(TINY, select(level))
    init_weights(model.named_parameters(), 2, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.double()


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET = ids(3, 20), ids(3, 17, seed=1)


@torch.no_grad()
def logits(model: Any, source: Tensor = SOURCE, target: Tensor = TARGET) -> Tensor:
    found: Tensor = model(target, Context(source=EncoderInput(tokens=source)))
    return found


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, level: CompileLevel, tmp_path: Path) -> None:
    theirs = peer(name, tmp_path)
    with torch.no_grad():
        wanted = theirs(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    found = logits(loading.load(tmp_path, device=CPU, level=level))
    assert wanted.abs().max() > 0.5
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs: Any = exact(peer(name, tmp_path))
    ours: Any = loading.load(tmp_path, device=CPU).double()
    scores = theirs(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    functional.cross_entropy(scores.flatten(0, 1), TARGET.flatten(), reduction="sum").backward()
    hidden = ours.hidden(TARGET, Context(source=EncoderInput(tokens=SOURCE))).flatten(0, 1)
    ours.kernels.linear_cross_entropy(hidden, ours.head_weight, TARGET.flatten()).backward()
    named = dict(theirs.named_parameters())
    converter = converter_of_type("t5")
    mappings = converter.tensor_mappings(ours.config, "t5")
    assert len(mappings) == len(list(ours.parameters()))
    for mapping in mappings:
        own, wanted = ours.get_parameter(mapping.ours).grad, named[mapping.theirs].grad
        assert (own - wanted).norm() < 1e-9 * wanted.norm(), mapping


@pytest.mark.parametrize("name", VARIANTS)
def test_an_exported_folder_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    peer(name, tmp_path / "theirs")
    ours = loading.load(tmp_path / "theirs", device=CPU)
    loading.save(ours, tmp_path / "ours")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        found = again(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    assert (found - logits(ours)).abs().max() < 1e-5


def test_a_head_of_its_own_comes_back(tmp_path: Path) -> None:
    model = tiny().float()
    loading.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (False, False)
    torch.testing.assert_close(logits(loading.load(tmp_path, device=CPU)), logits(model))


def test_folders_of_both_generations_mean_the_same(tmp_path: Path) -> None:
    peer("first", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    read = converter_of_type("t5").read_config
    old = {
        name: value for name, value in config.items() if name not in ("scale_decoder_outputs", "tie_word_embeddings")
    }
    assert read(old).scales_output
    assert read(old) == read(config)
    new = read(old | {"tie_word_embeddings": False})
    assert (new.tie_embeddings, new.scales_output) == (False, False)
    with pytest.raises(ModelError, match="another activation"):
        read(old | {"feed_forward_proj": "gated-silu"})


def test_the_old_copies_of_the_embedding_are_left_out(tmp_path: Path) -> None:
    peer("first", tmp_path)
    wanted = logits(loading.load(tmp_path, device=CPU))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(loading.load(tmp_path, device=CPU)), wanted)


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("first", [1, 4])
def test_the_cache_computes_what_a_whole_pass_does(level: CompileLevel, first: int) -> None:
    model = tiny(level)
    context = Context(source=EncoderInput(tokens=SOURCE, keeps_keys=True), attend=DecoderCache(17))
    with torch.no_grad():
        parts = [model(TARGET[:, :first], context)]
        parts += [model(TARGET[:, place : place + 1], context) for place in range(first, 17)]
    assert (torch.cat(parts, dim=1) - logits(model)).abs().max() < 1e-12


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_pairs_of_a_packed_row_are_those_alone(level: CompileLevel) -> None:
    model = tiny(level)
    lengths = [(5, 4), (7, 1), (1, 6)]
    pairs = [(ids(1, source, seed), ids(1, target, seed + 9)) for seed, (source, target) in enumerate(lengths)]
    # Two tokens of padding on both sides, of which the second row is all.
    source, target = (torch.cat([pair[side] for pair in pairs], dim=1) for side in (0, 1))
    numbers = [
        torch.repeat_interleave(torch.arange(3), torch.tensor([each[side] for each in lengths])) for side in (0, 1)
    ]
    source, target = (functional.pad(each, (0, 2)) for each in (source, target))
    documents = [functional.pad(each, (0, 2), value=9).unsqueeze(0) for each in numbers]
    context = Context(documents=documents[1], source=EncoderInput(tokens=source, documents=documents[0]))
    packed = model(target, context)
    start = 0
    for own, wanted in pairs:
        length = wanted.shape[1]
        alone = model(wanted, Context(source=EncoderInput(tokens=own)))
        assert (packed[:, start : start + length] - alone).abs().max() < 1e-12
        start += length
    # Padding without a source is finite, and gives no gradient that is not.
    context = Context(documents=documents[1], source=EncoderInput(tokens=source, documents=documents[0] % 9))
    model(target, context)[:, :start].sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


@pytest.mark.parametrize("is_causal", [True, False])
def test_buckets_are_those_of_transformers(is_causal: bool) -> None:
    for count, largest in ((32, 128), (8, 12), (64, 1000)):
        bias = RelativeBias(Relative(num_buckets=count, max_distance=largest), 1, is_causal=is_causal)
        bias.weight.data = torch.arange(count).view(-1, 1).float()
        positions = torch.arange(3000)
        found = bias(positions[1500:1501], positions)[0, 0]
        distances = positions - 1500
        wanted = T5Attention._relative_position_bucket(
            distances, bidirectional=not is_causal, num_buckets=count, max_distance=largest
        )
        assert torch.equal(found.long(), wanted)


def test_recomputation_and_dropout() -> None:
    model = EncoderDecoder(replace(TINY, dropout=0.3), select("O1"))
    init_weights(model.named_parameters(), 2, seed=1)
    key = DropoutKey(seed=0, step=0, samples=(0, 1, 2))
    found = []
    for recompute in get_args(Recompute):
        model.recompute = recompute
        out = model(TARGET, Context(source=EncoderInput(tokens=SOURCE), dropout=key))
        found.append([out, *torch.autograd.grad(out.logsumexp(-1).sum(), list(model.parameters()))])
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))
    assert not torch.equal(found[0][0], model(TARGET, Context(source=EncoderInput(tokens=SOURCE))))
    # Rows of a batch have the noise of their numbers.
    part = DropoutKey(seed=0, step=0, samples=(1, 2))
    own = model(TARGET[1:], Context(source=EncoderInput(tokens=SOURCE[1:]), dropout=part))
    torch.testing.assert_close(own, found[0][0][1:], rtol=1e-5, atol=1e-6)


def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    model = tiny().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model)
    wanted = logits(model)
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_source_is_needed() -> None:
    with pytest.raises(ModelError, match="needs a source"):
        tiny()(TARGET)


def test_a_language_model_task_refuses_the_family() -> None:
    with pytest.raises(ConfigError, match="task=translation"):
        config_of({"family": "t5"}, "language model")


def test_initial_weights_keep_unit_variance() -> None:
    config = T5Config(vocab_size=300, dim=256, num_layers=1, num_heads=4, mlp_dim=512)
    model: Any = loading.build(config, device=CPU, seed=0)
    for name, deviation in (("embedding.weight", 1.0), ("encoder.blocks.0.attention.query.weight", 1 / 128)):
        assert abs(float(model.get_parameter(name).std()) - deviation) < 0.05 * deviation
    with torch.no_grad():
        found = logits(model, SOURCE, TARGET)
    # Under a scaled head the logits of random tokens have the variance of a normalized vector.
    assert 0.7 < float(found.std()) < 1.4


@pytest.mark.prove
def test_compiled_blocks_compute_what_the_network_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # The code that is generated is tested in tests/core/nn/test_compiled.py; this is what the compiler is given.
    if "KITFORGE_PROVE" not in os.environ:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = tiny("O2").float()
    wanted = model(TARGET, Context(source=EncoderInput(tokens=SOURCE)))
    grads = torch.autograd.grad(wanted.logsumexp(-1).sum(), list(model.parameters()))
    model.compile_blocks()
    found = model(TARGET, Context(source=EncoderInput(tokens=SOURCE)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for own, right in zip(torch.autograd.grad(found.logsumexp(-1).sum(), list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-4)
