"""GGUF files of mixtures of experts, as llama.cpp's conversion writes them."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError
from kitforge.models import loading
from tests.models.conftest import GetPeer
from tests.models.variants import largest_difference, logits_of, ours_from, tokens

CPU = torch.device("cpu")
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe_gguf": "qwen3moe"}
NAMES = {"attn_q": "query", "attn_k": "key", "attn_v": "value", "attn_output": "out"}


def paired(rows: Tensor, num_heads: int) -> Tensor:
    """`LlamaModel.permute` of llama.cpp's conversion."""
    return rows.reshape(num_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def written(path: Path, model: Any, architecture: str, **changes: Any) -> Path:
    """The file of a network, whose entries and number of stored experts may be changed."""
    config, experts = model.config, model.config.experts
    writer = gguf.GGUFWriter(path, architecture)
    entries = {
        "context_length": config.max_length,
        "embedding_length": config.dim,
        "block_count": config.num_layers,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": model.geometry.head_dim,
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
    }
    entries |= {"expert_feed_forward_length": config.expert_dim} if architecture == "qwen3moe" else {}
    stored = changes.pop("stored", experts.num_experts)
    for name, value in (entries | changes).items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)

    def add(name: str, tensor: Tensor) -> None:
        writer.add_tensor(f"{name}.weight", tensor.detach().numpy().copy())

    add("token_embd", model.embedding.weight)
    add("output_norm", model.norm.weight)
    add("output", model.output)
    for layer, block in enumerate(model.blocks):
        add(f"blk.{layer}.attn_norm", block.attention_norm.weight)
        add(f"blk.{layer}.ffn_norm", block.mlp_norm.weight)
        add(f"blk.{layer}.ffn_gate_inp", block.mlp.router.weight)
        for name in ("gate", "up", "down"):
            add(f"blk.{layer}.ffn_{name}_exps", getattr(block.mlp.experts, name)[:stored])
        for theirs, ours in NAMES.items():
            rows, heads = getattr(block.attention, ours).weight, {"query": config.num_heads, "key": config.num_kv_heads}
            is_paired = architecture == "llama" and ours in heads
            add(f"blk.{layer}.{theirs}", paired(rows, heads[ours]) if is_paired else rows)
        if architecture == "qwen3moe":
            add(f"blk.{layer}.attn_q_norm", block.attention.query_norm.weight)
            add(f"blk.{layer}.attn_k_norm", block.attention.key_norm.weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_of_stacked_experts_gives_the_logits_of_its_network(name: str, peer: GetPeer, tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", ours_from(peer(name).folder), ARCHITECTURES[name])
    read = loading.load(path, device=CPU)
    assert read.config.family == name.removesuffix("_gguf")
    assert largest_difference(logits_of(read, tokens()), logits_of(peer(name).model, tokens())) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stored": 3}, r"blk\.0\.ffn_gate_exps.*(\n|.)*got: +\(3, 96, 64\)(\n|.)*expected: 4 experts(\n|.)*do: "),
        ({"expert_count": 3}, r"got: +\(4, 96, 64\)(\n|.)*expected: 3 experts(\n|.)*do: "),
        ({"expert_gating_func": 2}, "expert_gating_func=2"),
        ({"expert_shared_count": 1}, "expert_shared_count=1"),
    ],
    ids=str,
)
def test_a_file_of_other_experts_is_refused(
    changes: dict[str, int], message: str, peer: GetPeer, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.gguf", ours_from(peer("mixtral").folder), "llama", **changes)
    with pytest.raises(ModelError, match=message):
        loading.load(path, device=CPU)


def test_a_mixture_is_not_written_as_gguf(peer: GetPeer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="got: +mixtral"):
        loading.save(ours_from(peer("mixtral").folder), tmp_path / "a.gguf")
