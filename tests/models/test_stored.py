"""A folder's header is compared with the network that it speaks of before any memory is made; what is written is what
was published."""

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from kitforge.foundation.errors import ModelError
from kitforge.models import folder as model_folder
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig

SIZES: dict[str, Any] = {"vocab_size": 37, "dim": 16, "num_layers": 2, "num_heads": 4, "max_length": 32}
NETWORKS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, mlp_dim=24),
    "tied": LlamaConfig(**SIZES, mlp_dim=24, tie_embeddings=True),
    "gpt2": GPT2Config(**SIZES),
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
    with mock.patch.object(model_folder, "make_real", side_effect=AssertionError("memory was made")):
        started = time.process_time()
        with pytest.raises(ModelError, match=words):
            model_folder.load(folder, device=CPU)
        assert time.process_time() - started < 1


ABSURD = [
    ("llama", {"num_hidden_layers": 10**12}, "does not hold the network"),
    ("llama", {"num_hidden_layers": 3}, "missing"),
    ("llama", {"vocab_size": 10**12}, "misshapen"),
    ("llama", {"hidden_size": 4 * 10**8, "head_dim": 10**8}, "misshapen"),
    ("llama", {"intermediate_size": 25}, r"misshapen \(model.layers.0.mlp.*got \[24, 16\], expected \[25, 16\]"),
    ("tied", {"vocab_size": 38}, "misshapen"),
    ("gpt2", {"n_layer": 10**12}, "does not hold the network"),
    ("gpt2", {"n_positions": 10**10}, "misshapen"),
    ("glm", {"num_hidden_layers": 10**12}, "does not hold the network"),
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
