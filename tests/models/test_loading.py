"""A folder's header is compared with the network that it speaks of before any memory is made; what is written is what
was published."""

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.models import loading as model_folder
from kitforge.models.bloom.model import BloomConfig
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from tests.allocations import Allocations

SIZES: dict[str, Any] = {"vocab_size": 37, "dim": 16, "num_layers": 2, "num_heads": 4, "max_length": 32}
NETWORKS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, mlp_dim=24),
    "tied": LlamaConfig(**SIZES, mlp_dim=24, tie_embeddings=True),
    "bloom": BloomConfig(**SIZES),
    "gpt2": GPT2Config(**SIZES),
    "pangu_alpha": PanguAlphaConfig(**SIZES),
    "glm": GLMConfig(**SIZES, num_kv_heads=2, mlp_dim=24),
}
CPU = torch.device("cpu")


def written(folder: Path, name: str = "llama", dtype: Any = None) -> Path:
    model_folder.save(model_folder.build(NETWORKS[name], device=CPU, seed=1), folder, dtype=dtype)
    return folder


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder: Path, words: str) -> None:
    """Refused without a byte of memory for weights, and at once."""
    with mock.patch.object(model_folder, "materialize", side_effect=AssertionError("memory was made")):
        started = time.process_time()
        with pytest.raises(ModelError, match=words):
            model_folder.load(folder, device=CPU)
        assert time.process_time() - started < 1


ABSURD = [
    ("llama", {"num_hidden_layers": 9999}, "does not hold the network"),
    ("llama", {"num_hidden_layers": 3}, "missing"),
    ("llama", {"vocab_size": 10**9}, "misshapen"),
    ("llama", {"hidden_size": 4 * 10**8, "head_dim": 10**8}, "misshapen"),
    ("llama", {"intermediate_size": 25}, r"misshapen \(model.layers.0.mlp.*got \[24, 16\], expected \[25, 16\]"),
    ("tied", {"vocab_size": 38}, "misshapen"),
    ("bloom", {"n_layer": 9999}, "does not hold the network"),
    ("bloom", {"hidden_size": 4 * 10**8}, "misshapen"),
    ("gpt2", {"n_layer": 9999}, "does not hold the network"),
    ("gpt2", {"n_positions": 10**9}, "misshapen"),
    ("glm", {"num_hidden_layers": 9999}, "does not hold the network"),
    ("glm", {"intermediate_size": 10**9}, "misshapen"),
]


@pytest.mark.parametrize(("name", "values", "words"), ABSURD, ids=str)
def test_a_config_of_other_sizes_than_the_weights_is_refused_before_memory_is_made(
    tmp_path: Path, name: str, values: dict[str, Any], words: str
) -> None:
    change(written(tmp_path, name), **values)
    refused(tmp_path, words)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("prefix", [True, False])
def test_what_fits_is_read(tmp_path: Path, name: str, prefix: bool) -> None:
    """Also under the names that a bare model has."""
    written(tmp_path, name)
    if not prefix:
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        bare = {each.removeprefix("model.").removeprefix("transformer."): tensor for each, tensor in tensors.items()}
        save_file(bare, path, metadata={"format": "pt"})
    model = model_folder.load(tmp_path, device=CPU)
    expected = dict(model_folder.build(NETWORKS[name], device=CPU, seed=1).named_parameters())
    assert all(torch.equal(each, expected[own]) for own, each in model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_the_dtype_that_the_weights_were_published_in(tmp_path: Path, dtype: Any) -> None:
    written(tmp_path / "published", dtype=dtype)
    model = model_folder.load(tmp_path / "published", device=CPU)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model.config.dtype == dtype
    model_folder.save(model, tmp_path / "again")
    published, again = (load_file(tmp_path / name / "model.safetensors") for name in ("published", "again"))
    assert {each.dtype for each in again.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(each, published[name]) for name, each in again.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == dtype


def test_another_dtype_may_be_asked_for(tmp_path: Path) -> None:
    model = model_folder.load(written(tmp_path / "published", dtype="bfloat16"), device=CPU)
    model_folder.save(model, tmp_path / "again", dtype="float32")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert (tmp_path / "published" / "model.safetensors").stat().st_size < 0.7 * (
        tmp_path / "again" / "model.safetensors"
    ).stat().st_size


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = model_folder.build(NETWORKS["llama"], device=CPU, seed=1)
    with torch.no_grad():
        model.norm.weight.fill_(1e5)
    with pytest.raises(ModelError, match="norm.weight' has weights that float16 cannot hold(.|\n)*bfloat16"):
        model_folder.save(model, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out" / "config.json").exists()


# From file to file


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("dtype", "published"),
    [(None, torch.bfloat16), ("float32", torch.float64), ("bfloat16", torch.float32), ("float16", torch.bfloat16)],
)
def test_an_export_of_a_folder_is_that_of_its_model_byte_for_byte(
    tmp_path: Path, name: str, dtype: Any, published: torch.dtype
) -> None:
    source = written(tmp_path / "source", name)
    tensors = load_file(source / "model.safetensors")
    changed = {each: (tensor.double() * 1.0000001).to(published) for each, tensor in tensors.items()}
    save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
    model_folder.save(model_folder.load(source, device=CPU), tmp_path / "whole", dtype=dtype)
    model_folder.export(model_folder.open_model(source), tmp_path / "streamed", dtype=dtype)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "streamed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


LARGE: dict[str, Any] = {"vocab_size": 601, "dim": 256, "num_layers": 3, "num_heads": 4, "max_length": 300}
# How many times the largest tensor. What is joined of several, and what is turned round in another dtype, are two.
MOST = [("llama", LlamaConfig(**LARGE, mlp_dim=512), 1), ("gpt2", GPT2Config(**LARGE), 2)]
MOST += [("glm", GLMConfig(**LARGE, num_kv_heads=2, mlp_dim=512), 2)]


@pytest.mark.parametrize(("name", "config", "times"), MOST, ids=[each[0] for each in MOST])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_of_a_folder_holds_one_tensor_at_a_time(
    tmp_path: Path, name: str, config: Any, times: int, dtype: Any
) -> None:
    model_folder.save(model_folder.build(config, device=CPU, seed=1), tmp_path / "source", dtype="bfloat16")
    with Allocations() as made:
        model_folder.export(model_folder.open_model(tmp_path / "source"), tmp_path / "out", dtype=dtype)
    sizes = [each.nbytes for each in load_file(tmp_path / "out" / "model.safetensors").values()]
    assert made.most <= times * max(sizes)
    assert (made.most > 0) == (dtype == "float32" or name != "llama")


def test_a_folder_may_be_exported_onto_itself(tmp_path: Path) -> None:
    source = written(tmp_path)
    before = load_file(source / "model.safetensors")
    kept = {name: each.clone() for name, each in before.items()}
    model_folder.export(model_folder.open_model(source), source, dtype="bfloat16")
    after = load_file(source / "model.safetensors")
    assert all(torch.equal(each, kept[name].bfloat16()) for name, each in after.items())


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    source = written(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="norm.weight' is not a weight"):
        model_folder.export(model_folder.open_model(source), tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", ["llama", "glm"])
@pytest.mark.parametrize(
    ("published", "dtype", "wanted"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),  # a CPU has no products in it
        ("bfloat16", "fp32", torch.float32),
        ("float32", "bf16", torch.bfloat16),
    ],
)
def test_weights_load_in_their_own_dtype_or_another(
    name: str, published: Any, dtype: Any, wanted: torch.dtype, tmp_path: Path
) -> None:
    folder = written(tmp_path, name, published)
    model = model_folder.load(folder, device=CPU, dtype=dtype)
    exact = model_folder.load(folder, device=CPU)
    for (key, one), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert one.dtype == wanted
        assert torch.equal(one, other.to(wanted)), key
    model_folder.save(model, tmp_path / "again")
    assert {each.dtype for each in load_file(tmp_path / "again" / "model.safetensors").values()} == {
        getattr(torch, published)
    }


def test_bfloat16_weights_are_never_in_memory_as_fp32(tmp_path: Path) -> None:
    wide = LlamaConfig(vocab_size=2000, dim=128, num_layers=2, num_heads=4, mlp_dim=300, max_length=32)
    model_folder.save(model_folder.build(wide, device=CPU, seed=1), tmp_path, dtype="bfloat16")
    size = (tmp_path / "model.safetensors").stat().st_size
    with Allocations() as made:
        model = model_folder.load(tmp_path, device=CPU, dtype="auto")
    assert sum(each.nbytes for each in model.parameters()) <= size
    assert made.most <= size
    with Allocations() as fp32:
        model_folder.load(tmp_path, device=CPU)
    assert fp32.most > 1.9 * size


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        model_folder.load(written(tmp_path), device=CPU, dtype="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tied", "gpt2", "bloom"])
def test_a_tied_folder_may_hold_its_head_alone(name: str, tmp_path: Path) -> None:
    written(tmp_path, name)
    wanted = dict(model_folder.load(tmp_path, device=CPU).named_parameters())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = next(
        each for each in tensors if each.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
    )
    tensors["lm_head.weight"] = tensors.pop(embedding)
    save_file(tensors, path, metadata={"format": "pt"})
    found = dict(model_folder.load(tmp_path, device=CPU).named_parameters())
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.get_input_embeddings().weight, wanted["embedding.weight"])
