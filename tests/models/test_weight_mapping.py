"""Folders are read whole: bare and sharded ones are understood, missing and surplus tensors are named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import read_folder
from kitforge.foundation.errors import ModelError
from kitforge.models.weight_mapping import import_tensors
from tests.models.conftest import GetPeer
from tests.models.variants import (
    Peer,
    converter_and_config,
    largest_difference,
    logits_of,
    ours_from,
    read_all,
    tokens,
)


@pytest.mark.parametrize(
    ("name", "body"),
    [("gpt2", "transformer"), ("llama_tied", "model"), ("glm_plain", "model"), ("bloom", "transformer")],
)
def test_a_folder_of_the_bare_network_is_read(name: str, body: str, peer: GetPeer, tmp_path: Path) -> None:
    getattr(peer(name).model, body).save_pretrained(tmp_path)
    assert not any(key.startswith(body) for key in read_folder(tmp_path).names())
    assert largest_difference(logits_of(ours_from(tmp_path), tokens()), logits_of(peer(name).model, tokens())) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "glm"])
def test_a_sharded_folder_is_read(name: str, peer: GetPeer, tmp_path: Path) -> None:
    peer(name).model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert largest_difference(logits_of(ours_from(tmp_path), tokens()), logits_of(peer(name).model, tokens())) < 1e-5


def test_a_bare_network_with_an_untied_head_lacks_the_head(peer: GetPeer, tmp_path: Path) -> None:
    peer("llama").model.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"1 missing \['lm_head.weight'\]"):
        ours_from(tmp_path)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("glm", "model.rotary_emb.inv_freq"),
    ],
)
def test_buffers_of_old_folders_are_left_out(name: str, buffer: str, peer: GetPeer) -> None:
    held = tensors_of(peer(name))
    plain = imported(peer(name), held)
    assert imported(peer(name), held | {buffer: torch.ones(1)}).keys() == plain.keys()


def test_missing_and_unexpected_tensors_are_both_listed(peer: GetPeer) -> None:
    held = tensors_of(peer("llama"))
    held["model.layers.7.mlp.up_proj.weight"] = held.pop("model.norm.weight")
    with pytest.raises(
        ModelError, match=r"1 missing \['model.norm.weight'\], 1 unexpected \['model.layers.7"
    ) as caught:
        imported(peer("llama"), held)
    assert f"expected: {len(held)} tensors" in str(caught.value)


def test_a_head_beside_a_tied_embedding_is_not_dropped_in_silence(peer: GetPeer) -> None:
    held = tensors_of(peer("llama_tied"))
    with pytest.raises(ModelError, match="lm_head.weight"):
        imported(peer("llama_tied"), held | {"lm_head.weight": torch.ones(97, 64)})


@pytest.mark.parametrize("name", ["gpt2", "llama_tied"])
def test_a_head_that_equals_the_embedding_it_is_tied_to_is_accepted(name: str, peer: GetPeer) -> None:
    held = tensors_of(peer(name))
    embedding = held[next(key for key in held if key.endswith(("wte.weight", "embed_tokens.weight")))]
    found, plain = imported(peer(name), held | {"lm_head.weight": embedding.clone()}), imported(peer(name), held)
    assert found.keys() == plain.keys()
    assert all(found[key].equal(plain[key]) for key in plain)


@pytest.mark.parametrize("rows", [100, 400])
def test_a_joined_tensor_of_another_size_is_refused(rows: int, peer: GetPeer) -> None:
    held = tensors_of(peer("gpt2"))
    held["transformer.h.0.attn.c_attn.weight"] = torch.zeros(64, rows)
    with pytest.raises(ModelError, match=rf"c_attn.*\n.*{rows} rows\n.*192 rows"):
        imported(peer("gpt2"), held)


def tensors_of(peer: Peer) -> dict[str, Tensor]:
    folder = read_folder(peer.folder)
    return {name: folder.tensor(name) for name in folder.names()}


def imported(peer: Peer, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converter, config = converter_and_config(peer)
    ours: Any = converter.read_config(config)
    mappings = converter.tensor_mappings(ours, config["model_type"])
    return read_all(import_tensors(converter, mappings, held, held.__getitem__))
