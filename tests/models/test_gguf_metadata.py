"""Every entry of a GGUF file's metadata is obeyed, changes nothing, or is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kitforge.foundation.errors import ModelError
from kitforge.models import loading
from kitforge.models.catalog import config_of

CPU = torch.device("cpu")
SIZES = {"family": "llama", "vocab_size": 40, "dim": 32, "num_layers": 2, "num_heads": 2, "mlp_dim": 48}
TOKENS = torch.randint(40, (2, 40), generator=torch.Generator().manual_seed(5))


def network() -> Any:
    model = loading.build(config_of({**SIZES, "max_length": 64}), device=CPU, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0) if parameter.dim() == 2 else parameter.add_(0.1)
    return model


def written(path: Path, entries: dict[str, Any]) -> Path:
    loading.save(network(), path, dtype="float32", extra=entries)
    return path


def logits(path: Path) -> Tensor:
    with torch.no_grad():
        return loading.load(path, device=CPU)(TOKENS)


def theirs(folder: Path, rope: dict[str, Any]) -> Tensor:
    """Of `transformers`, for the same weights with that scaling in config.json."""
    loading.save(network(), folder, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= rope
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        return transformers.LlamaForCausalLM.from_pretrained(folder)(TOKENS).logits


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN_THERE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTH = {"llama.rope.scaling.original_context_length": 16}


@pytest.mark.parametrize(
    ("entries", "rope"),
    [
        ({"llama.rope.scaling.factor": 4.0}, LINEAR),
        ({"llama.rope.scale_linear": 4.0}, LINEAR),
        ({"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 4.0}, LINEAR),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LINEAR),
        ({"llama.rope.scaling.type": "linear"}, {}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        (YARN | LENGTH, YARN_THERE),
        (
            YARN | LENGTH | {"llama.rope.scaling.yarn_beta_fast": 20.0, "llama.rope.scaling.yarn_beta_slow": 2.0},
            YARN_THERE | {"beta_fast": 20.0, "beta_slow": 2.0},
        ),
        (
            YARN | LENGTH | {"llama.rope.scaling.attn_factor": 1.5},
            YARN_THERE | {"attention_factor": 1.5 * (1 + 0.1 * math.log(4.0))},
        ),
    ],
    ids=str,
)
def test_positions_are_scaled_as_transformers_scales_them(
    tmp_path: Path, entries: dict[str, Any], rope: dict[str, Any]
) -> None:
    wanted = theirs(tmp_path / "folder", rope)
    assert torch.allclose(logits(written(tmp_path / "a.gguf", entries)), wanted, atol=2e-4, rtol=1e-4)
    assert torch.allclose(wanted, theirs(tmp_path / "plain", {}), atol=0.1) == (not rope)


@pytest.mark.parametrize(
    "entry",
    [
        {"llama.attention.scale": 0.5},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.attention.causal": False},
        {"llama.attention.value_length": 8},
        {"llama.attention.max_alibi_bias": 8.0},
        {"llama.rope.dimension_count": 8},
        {"llama.rope.scaling.attn_factor": 1.5},
        {"llama.rope.scaling.yarn_attn_factor": 1.5},
        {"llama.rope.scaling.yarn_ext_factor": 0.5},
        {"llama.rope.scaling.yarn_log_multiplier": 0.1},
        {"llama.rope.scaling.alpha": 1000.0},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.rope.scaling.factor": -1.0},
        {"llama.rope.dimension_sections": [1, 2]},
        {"llama.final_logit_softcapping": 30.0},
        {"llama.logit_scale": 0.5},
        {"llama.residual_scale": 0.2},
        {"llama.expert_shared_count": 1},
        {"llama.some_new_thing": 1.0},
        {"llama.some_new_thing": "yes"},
        {"tokenizer.ggml.some_new_thing": True},
        {"split.count": 2},
    ],
    ids=str,
)
def test_an_entry_that_would_change_the_network_is_refused_by_name(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = written(tmp_path / "a.gguf", entry)
    ((name, value),) = entry.items()
    with pytest.raises(ModelError, match=f"(?s){path}.*{name.rpartition('.')[2]}|{name.rpartition('.')[2]}.*{value}"):
        loading.open_model(path)


@pytest.mark.parametrize("num_parts", [0, 1])
def test_entries_that_change_nothing_are_read_over(num_parts: int, tmp_path: Path) -> None:
    entries = {
        "llama.attention.causal": True,
        "llama.attention.scale": 0.25,
        "llama.attention.clamp_kqv": 0.0,
        "llama.attention.sliding_window": 4096,
        "llama.expert_count": 0,
        "llama.logit_scale": 1.0,
        "llama.rope.scaling.finetuned": True,
        "llama.rope.scaling.yarn_ext_factor": -1.0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "general.license": "mit",
        "quantize.imatrix.chunks_count": 7,
        "someone.note": "hello",
        "split.count": num_parts,  # 0: joined again
    }
    assert torch.equal(logits(written(tmp_path / "a.gguf", entries)), logits(written(tmp_path / "b.gguf", {})))


def test_positions_are_not_scaled_twice(tmp_path: Path) -> None:
    scaling = {"kind": "llama3", "factor": 8.0, "original_length": 8192}
    model = loading.build(config_of({**SIZES, "max_length": 64, "rope_scaling": scaling}), device=CPU, seed=2)
    loading.save(model, tmp_path / "a.gguf", extra={"llama.rope.scaling.factor": 4.0})
    with pytest.raises(ModelError, match=r"(?s)twice.*linear"):
        loading.open_model(tmp_path / "a.gguf")
