"""Adapters in PEFT's folders, in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from kitforge.core.checkpoint.safetensors_file import TensorFile
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


def test_a_layer_that_shares_a_matrix_elsewhere_is_refused(tmp_path: Path) -> None:
    model = cast(Decoder, network(family=tiny.GPT2))
    attach(model, "policy", LoraConfig(target_modules=("query",)))
    with pytest.raises(ModelError, match="no matrix of its own"):
        save_adapter(model, adapter_tensors(model, "policy"), LoraConfig(target_modules=("query",)), tmp_path)
