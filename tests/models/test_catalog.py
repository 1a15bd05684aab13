"""The catalog turns plain options into a family's own, strictly."""

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from kitforge.foundation.errors import ConfigError
from kitforge.models.catalog import FAMILIES, config_of, families_of, recommender_of
from kitforge.models.glm.model import GLMConfig
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from tests.preset_values import preset_values

TINY = {"vocab_size": 97, "dim": 64, "num_layers": 2, "num_heads": 4}


def test_options_become_the_family_s_own() -> None:
    config = config_of({"family": "llama", "mlp_dim": 96, **TINY})
    assert config == LlamaConfig(vocab_size=97, dim=64, num_layers=2, num_heads=4, mlp_dim=96)


def test_every_family_is_listed_under_its_own_name() -> None:
    assert {name: family.config.family for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}


def test_a_language_model_has_a_hugging_face_format() -> None:
    assert all(family.convert is not None for family in families_of("language model").values())


def test_no_two_families_claim_one_model_type() -> None:
    types = [
        kind for each in families_of("language model").values() if each.convert for kind in each.convert.model_types
    ]
    assert types
    assert len(types) == len(set(types))


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"got: +lama\n.*did you mean 'llama'"):
        config_of({"family": "lama", **TINY})


def test_options_without_a_family_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown language model family"):
        config_of(TINY)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model.mlp_dims.*\n.*did you mean 'mlp_dim'"):
        config_of({"family": "llama", "mlp_dims": 96, **TINY})


@pytest.mark.parametrize("family", families_of("language model"))
def test_heads_that_do_not_divide_the_width_are_refused(family: str) -> None:
    values = {"family": family, **TINY, "num_heads": 5} | (
        {"mlp_dim": 96} if family in ("llama", "glm", "mixtral", "qwen3_moe") else {}
    )
    values |= {"experts": {"num_experts": 4, "top_k": 2}} if family in ("mixtral", "qwen3_moe") else {}
    values |= {"expert_dim": 32} if family == "qwen3_moe" else {}
    values |= {"num_kv_heads": 1} if family == "glm" else {}
    with pytest.raises(ConfigError, match="model.num_heads"):
        config_of(values)


@pytest.mark.parametrize("preset", [name for name in preset_values() if name in FAMILIES or name.endswith("_tiny")])
def test_a_number_that_no_network_can_have_is_refused_by_its_name(preset: str) -> None:
    values = preset_values()[preset]
    values |= {} if values["family"] == "vit" else {"vocab_size": 97}
    config: Any = recommender_of(preset_values()[preset]) if preset in FAMILIES else config_of(values)
    for name, kind in get_type_hints(type(config)).items():
        wrong = {int: [-1], int | None: [-1], float: [-1.0, math.nan], float | None: [-1.0, math.nan]}.get(kind, [])
        if wrong and not name.endswith(("dropout", "eps", "_id", "_position")):
            wrong = [*wrong, 0]  # which must not mean the default
        for value in wrong:
            with pytest.raises(ConfigError, match=rf"model\.({name}|image_mean)\b"):
                build_on_meta(dataclasses.replace(config, **{name: value}))


def test_an_encoder_has_no_head_of_its_own_weights() -> None:
    with pytest.raises(ConfigError, match="model.tie_embeddings"):
        config_of({"family": "bert", **TINY, "tie_embeddings": False})


def test_key_heads_that_do_not_divide_the_heads_are_refused() -> None:
    config = config_of({"family": "llama", "mlp_dim": 96, "num_kv_heads": 3, **TINY})
    with pytest.raises(ConfigError, match="num_kv_heads"):
        config.decoder()


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_rotated_fraction_outside_of_a_head_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="rotary_fraction"):
        GLMConfig(
            vocab_size=97, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=96, rotary_fraction=fraction
        )


def test_a_family_of_another_kit_says_which_task_it_is_for() -> None:
    with pytest.raises(ConfigError, match="add task=recommendation"):
        config_of({"family": "wide_deep"})
    with pytest.raises(ConfigError, match="task=text_generation"):
        recommender_of({"family": "llama"})


# As published; tied embeddings count once, and of Bloom's 65b there is a configuration alone. PanGu-alpha tells the
# first digits.
PARAMETERS = {
    "bloom_560m": 559_214_592,
    "bloom_7.1b": 7_069_016_064,
    "bloom_176b": 176_247_271_424,
    "flan_t5_base": 247_577_856,
    "flan_t5_small": 76_961_152,
    "flan_t5_xxl": 11_135_332_352,
    "gemma3_1b": 999_885_952,
    "pangualpha_13b": 12.8e9,
    "pangualpha_2_6b": 2.6e9,
    "smollm3_3b": 3_075_098_624,
    "t5_base": 222_903_552,
    "t5_small": 60_506_624,
}


def test_presets_have_the_published_number_of_parameters() -> None:
    values = preset_values()
    for preset, wanted in PARAMETERS.items():
        network = build_on_meta(config_of(values[preset]))
        found = sum(each.numel() for each in network.parameters())
        assert found == (pytest.approx(wanted, rel=0.01) if preset.startswith("pangu") else wanted), preset
