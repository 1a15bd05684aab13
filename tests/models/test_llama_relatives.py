"""Gemma 3 and SmolLM3: sizes of the published models, their config.json, and what no architecture has."""

from dataclasses import replace
from typing import Any

import pytest

from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import config_of
from kitforge.models.llama.convert import read_config, write_config
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from tests.preset_values import preset_values

# As published; tied embeddings count once.
PARAMETERS = {"gemma3_1b": 999_885_952, "smollm3_3b": 3_075_098_624}
# The keys that describe the network in the published folders, which transformers 4 wrote.
GEMMA3_1B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
SMOLLM3_3B: dict[str, Any] = {
    "model_type": "smollm3",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
}
PUBLISHED = {"gemma3_1b": GEMMA3_1B, "smollm3_3b": SMOLLM3_3B}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_network(preset: str) -> None:
    config = config_of(preset_values()[preset])
    assert config == read_config(PUBLISHED[preset])
    assert sum(each.numel() for each in build_on_meta(config).parameters()) == PARAMETERS[preset]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_absent_keys_mean_what_the_architecture_means_by_them(preset: str) -> None:
    implied = {"head_dim", "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window_pattern", "no_rope_layers"}
    implied |= {"hidden_activation", "rope_scaling", "no_rope_layer_interval", "use_sliding_window"}
    bare = {name: value for name, value in PUBLISHED[preset].items() if name not in implied}
    assert read_config(bare) == read_config(PUBLISHED[preset])


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
    ],
)
def test_another_gemma_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="Gemma 3 of another architecture"):
        read_config(GEMMA3_1B | change)


def test_a_list_of_layers_of_another_length_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no_rope_layers=\[1, 0\]"):
        read_config(SMOLLM3_3B | {"no_rope_layers": [1, 0]})


PLAIN = LlamaConfig(vocab_size=97, dim=32, num_layers=2, num_heads=4, mlp_dim=48)


@pytest.mark.parametrize(
    "options",
    [
        {"mlp_kind": "geglu"},
        {"sandwich_norms": True},
        {"scale_embedding": True},
        {"query_pre_attn_scalar": 9},
        {"local_rope_theta": 9.0, "sliding_window": 4},
        {"no_rope_layers": (0,), "qk_norm": True},
        {"no_rope_layers": (0,), "mlp_kind": "geglu"},
        {"no_rope_layers": (0,), "qk_norm": True, "mlp_kind": "geglu", "sandwich_norms": True, "scale_embedding": True},
    ],
)
def test_what_no_architecture_has_is_not_exported(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="no Hugging Face architecture"):
        write_config(replace(PLAIN, **options))
