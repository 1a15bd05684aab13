"""Adapters in PEFT's folders, in and out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach
from kitforge.foundation.errors import ModelError
from kitforge.models.peft import load_adapter, save_adapter
from tests.kits.rlhf.runs import network
from tests.trainer import tiny

CONFIG = LoraConfig(rank=2, alpha=8.0, target_modules=("query", "up"))
TOKENS = torch.arange(9).unsqueeze(0)


def adapted() -> Decoder:
    model = cast(Decoder, network())
    attach(model, "policy", CONFIG)
    for down, up in adapter_tensors(model, "policy").values():
        up.data.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(up.shape[0])) * 0.1)
        down.data.mul_(2)
    return model


def saved(folder: Path, base: str | None = None) -> None:
    model = adapted()
    save_adapter(model, adapter_tensors(model, "policy"), CONFIG, folder, base)


def test_a_saved_adapter_gives_the_same_logits(tmp_path: Path) -> None:
    model, fresh = adapted(), cast(Decoder, network())
    save_adapter(model, adapter_tensors(model, "policy"), CONFIG, tmp_path)
    assert load_adapter(fresh, "mine", tmp_path) == LoraConfig(rank=2, alpha=8.0, target_modules=("query", "up"))
    with torch.no_grad():
        assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_the_folder_has_the_names_that_peft_has(tmp_path: Path) -> None:
    saved(tmp_path, base="some/llama")
    page = json.loads((tmp_path / "adapter_config.json").read_text())
    assert page["target_modules"] == ["q_proj", "up_proj"]
    assert (page["peft_type"], page["r"], page["lora_alpha"]) == ("LORA", 2, 8.0)
    names = TensorFile(tmp_path / "adapter_model.safetensors", ModelError).names()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in names
    assert len(names) == 8


def test_an_adapter_of_another_kind_or_network_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    other = cast(Decoder, network(family=tiny.GPT2))
    with pytest.raises(ModelError, match="another architecture"):
        load_adapter(other, "policy", tmp_path)
    wider = cast(Decoder, network(family=tiny.LLAMA | {"dim": 64}))
    with pytest.raises(ModelError, match="another shape"):
        load_adapter(wider, "policy", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ModelError, match="plain LoRA"):
        load_adapter(cast(Decoder, network()), "policy", tmp_path)


@pytest.mark.parametrize("targets", [("query",), ("key", "out"), ("query", "key", "value"), ("value", "down", "up")])
def test_layers_that_share_a_matrix_elsewhere_come_back_each_with_its_own_factors(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    model, config = cast(Decoder, network(family=tiny.GPT2)), LoraConfig(rank=2, alpha=3.0, target_modules=targets)
    attach(model, "policy", config)
    factors = adapter_tensors(model, "policy")
    for seed, each in enumerate(factor for pair in factors.values() for factor in pair):
        each.data.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(seed)))
    save_adapter(model, factors, config, tmp_path)
    fresh = cast(Decoder, network(family=tiny.GPT2))
    assert load_adapter(fresh, "mine", tmp_path) == replace(config, target_modules=tuple(sorted(targets)))
    for path, pair in adapter_tensors(fresh, "mine").items():
        for got, wanted in zip(pair, factors[path], strict=True):
            assert torch.equal(got, wanted), path


def test_dora_of_a_part_of_a_joint_matrix_is_refused(tmp_path: Path) -> None:
    model = cast(Decoder, network(family=tiny.GPT2))
    config = LoraConfig(kind="dora", target_modules=("query",))
    attach(model, "policy", config)
    with pytest.raises(ModelError, match=r"(?s)c_attn has no form in PEFT.*adapt all of query, key, value"):
        save_adapter(model, adapter_tensors(model, "policy"), config, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rank_pattern": {"c_attn": 5}},
        {"alpha_pattern": {"c_attn": 5}},
        {"alpha_pattern": {"h.1.attn.c_attn": 24.0}},
        {"rank_pattern": {"c_attn": 2}},
    ],
)
def test_several_ranks_and_scales_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    model, config = cast(Decoder, network(family=tiny.GPT2)), LoraConfig(rank=2, target_modules=("query",))
    attach(model, "policy", config)
    save_adapter(model, adapter_tensors(model, "policy"), config, tmp_path)
    path = tmp_path / "adapter_config.json"
    page = json.loads(path.read_text())
    assert page["rank_pattern"] == {"c_attn": 6}
    path.write_text(json.dumps(page | change))
    with pytest.raises(ModelError, match="several ranks or scales"):
        load_adapter(cast(Decoder, network(family=tiny.GPT2)), "mine", tmp_path)


def test_a_joint_rank_that_mixes_its_layers_is_refused(tmp_path: Path) -> None:
    model, config = cast(Decoder, network(family=tiny.GPT2)), LoraConfig(rank=2, target_modules=("query",))
    attach(model, "policy", config)
    save_adapter(model, adapter_tensors(model, "policy"), config, tmp_path)
    file = TensorFile(tmp_path / "adapter_model.safetensors", ModelError)
    tensors = {name: file.tensor(name) + name.endswith("lora_B.weight") for name in file.names()}
    write(tmp_path / "adapter_model.safetensors", list(tensors.items()))
    with pytest.raises(ModelError, match="of another rank"):
        load_adapter(cast(Decoder, network(family=tiny.GPT2)), "mine", tmp_path)
