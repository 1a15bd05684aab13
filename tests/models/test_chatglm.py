"""ChatGLM2/3 folders hold the network that `transformers` calls GLM, under other names and joined otherwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import write_folder
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import converter_of_type
from tests.models.conftest import GetPeer
from tests.models.variants import largest_difference, logits_of, ours_from, tokens

NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.dense.weight",
    "mlp.gate_up_proj.weight": "mlp.dense_h_to_4h.weight",
    "mlp.down_proj.weight": "mlp.dense_4h_to_h.weight",
}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_chatglm_folder_computes_what_its_glm_computes(level: CompileLevel, peer: GetPeer, tmp_path: Path) -> None:
    glm = peer("glm").model
    write_folder(tmp_path, chatglm_config(glm.config), chatglm_tensors(glm.state_dict()).items())
    assert largest_difference(logits_of(ours_from(tmp_path, level), tokens()), logits_of(glm, tokens())) < 1e-5


def test_key_groups_that_disagree_with_the_weights_are_refused(peer: GetPeer, tmp_path: Path) -> None:
    glm = peer("glm").model
    config = chatglm_config(glm.config) | {"multi_query_group_num": 1}
    write_folder(tmp_path, config, chatglm_tensors(glm.state_dict()).items())
    with pytest.raises(ModelError, match=r"query_key_value.*\n.*128 rows\n.*96 rows"):
        ours_from(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"rmsnorm": False},
        {"add_bias_linear": True},
        {"post_layer_norm": False},
        {"apply_residual_connection_post_layernorm": True},
    ],
)
def test_a_chatglm_of_another_architecture_is_refused(change: dict[str, Any], peer: GetPeer) -> None:
    config = chatglm_config(peer("glm").model.config)
    with pytest.raises(ModelError, match=next(iter(change))):
        converter_of_type("chatglm").read_config(config | change)


@pytest.mark.parametrize(("ratio", "theta"), [(None, 10000.0), (50.0, 500000.0)])
def test_the_base_of_the_rotation_follows_the_ratio(ratio: float | None, theta: float, peer: GetPeer) -> None:
    config = chatglm_config(peer("glm").model.config) | ({} if ratio is None else {"rope_ratio": ratio})
    rotary = converter_of_type("chatglm").read_config(config).decoder().positions
    assert rotary is not None
    assert rotary.theta == theta


def test_without_query_groups_every_head_has_its_own_key(peer: GetPeer) -> None:
    config = chatglm_config(peer("glm").model.config) | {"multi_query_attention": False}
    assert converter_of_type("chatglm").read_config(config).decoder().blocks[0].attention.num_kv_heads == 4


def chatglm_config(glm: Any) -> dict[str, Any]:
    """The config.json of the same network as ChatGLM names it."""
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "padded_vocab_size": glm.vocab_size,
        "hidden_size": glm.hidden_size,
        "num_layers": glm.num_hidden_layers,
        "num_attention_heads": glm.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": glm.num_key_value_heads,
        "kv_channels": glm.head_dim,
        "ffn_hidden_size": glm.intermediate_size,
        "seq_length": glm.max_position_embeddings,
        "layernorm_epsilon": glm.rms_norm_eps,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
    }


def chatglm_tensors(glm: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a GLM as ChatGLM lays them out, with the table of frequencies that its files also hold."""
    tensors = {
        "transformer.embedding.word_embeddings.weight": glm["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": glm["model.norm.weight"],
        "transformer.output_layer.weight": glm["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(4),
    }
    for layer in range(2):
        source, target = f"model.layers.{layer}.", f"transformer.encoder.layers.{layer}."
        tensors |= {target + theirs: glm[source + ours] for ours, theirs in NAMES.items()}
        for kind in ("weight", "bias"):
            parts = [glm[f"{source}self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            tensors[f"{target}self_attention.query_key_value.{kind}"] = torch.cat(parts)
    return tensors
