"""Gemma 3 and SmolLM3: sizes of the published models, their config.json, and what no architecture has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import config_of
from kitforge.models.llama.convert import read_config, write_config
from kitforge.models.llama.model import LlamaConfig
from tests.preset_values import preset_values

# The keys that describe the network in the published folders, which transformers 4 wrote.
LINES = Path(__file__).with_name("published_networks.jsonl").read_text(encoding="utf-8").splitlines()
NETWORKS: dict[str, dict[str, Any]] = {each["name"]: each["config"] for each in map(json.loads, LINES)}
PUBLISHED = {name: NETWORKS[name] for name in ("gemma3_1b", "smollm3_3b")}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_network(preset: str) -> None:
    assert config_of(preset_values()[preset]) == read_config(PUBLISHED[preset])


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
        read_config(NETWORKS["gemma3_1b"] | change)


def test_a_list_of_layers_of_another_length_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no_rope_layers=\[1, 0\]"):
        read_config(NETWORKS["smollm3_3b"] | {"no_rope_layers": [1, 0]})


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
