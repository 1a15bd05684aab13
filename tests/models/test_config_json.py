"""config.json is read in both generations, completely or not at all."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers

from kitforge.core.nn.rotary import RopeScaling, RotaryAngles, RotaryConfig
from kitforge.foundation.errors import ConfigError, KitforgeError, ModelError
from kitforge.models.catalog import config_of, converter_of, converter_of_type
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.weight_mapping import ConfigFile, read_rope
from tests.models.conftest import GetPeer
from tests.models.test_llama_relatives import NETWORKS
from tests.models.variants import VARIANTS, converter_and_config

# What the first files of LLaMA 3.2 looked like.
LLAMA32 = NETWORKS["llama3_2"]


@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_share_of_the_head_that_rotates_may_be_all_of_it(fraction: float) -> None:
    assert read_rope(ConfigFile({"rope_theta": 1e4, "partial_rotary_factor": fraction}))["fraction"] == fraction
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        read_rope(ConfigFile({"partial_rotary_factor": fraction + 1}))


def test_a_published_file_of_the_fourth_generation_is_read() -> None:
    assert read(LLAMA32) == LlamaConfig(
        vocab_size=128256,
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_dim=8192,
        max_length=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_length=8192),
        tie_embeddings=True,
    )


@pytest.mark.parametrize("word", ["type", "rope_type"])
@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith(("gpt2", "bloom"))])
def test_both_generations_say_the_same(name: str, word: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    assert config["rope_parameters"]
    assert converter.read_config(of_the_fourth_generation(config, word)) == converter.read_config(config)


def of_the_fourth_generation(config: dict[str, Any], word: str) -> dict[str, Any]:
    """The file as it was before rope_parameters and dtype, with the scaling's kind under the key `word`."""
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype")
    rope = dict(old.pop("rope_parameters"))
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {word: kind, **rope}
    return old


def test_the_original_length_may_stand_outside_of_the_scaling() -> None:
    scaling = {key: value for key, value in LLAMA32["rope_scaling"].items() if not key.startswith("original")}
    assert read(LLAMA32 | {"rope_scaling": scaling, "original_max_position_embeddings": 8192}) == read(LLAMA32)


def test_a_window_of_qwen_is_off_unless_switched_on(peer: GetPeer) -> None:
    _, config = converter_and_config(peer("qwen2"))
    config = config | {"sliding_window": 8, "layer_types": None, "max_window_layers": 0}
    assert read(config | {"use_sliding_window": False}).sliding_window is None
    assert read(config | {"use_sliding_window": True}).sliding_window == 8


@pytest.mark.parametrize("max_window_layers", [0, 1, 2])
def test_a_window_of_qwen_starts_at_its_layer(max_window_layers: int, peer: GetPeer) -> None:
    _, config = converter_and_config(peer("qwen2_window"))
    blocks = read(config | {"layer_types": None, "max_window_layers": max_window_layers}).decoder().blocks
    assert [block.attention.window for block in blocks] == [None] * max_window_layers + [8] * (2 - max_window_layers)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("glm", {"hidden_act": "relu"}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"add_cross_attention": True}),
    ],
)
def test_a_network_that_we_do_not_compute_is_refused(name: str, change: dict[str, Any], peer: GetPeer) -> None:
    _, config = converter_and_config(peer(name))
    with pytest.raises(ModelError, match=str(next(iter(change.values())))):
        read(config | change)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="proportional"):
        read(LLAMA32 | {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}})


def test_an_unknown_option_of_a_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="mrope_section"):
        read(LLAMA32 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [8, 8]}})


@pytest.mark.parametrize("name", ["llama", "gpt2", "glm"])
def test_every_key_that_is_needed_is_named_when_it_is_missing(name: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    needed = [key for key in config if not reads(config, without=key)]
    assert len(needed) >= 4
    for key in needed:
        with pytest.raises(ModelError, match=rf"expected: {key}"):
            converter.read_config({other: value for other, value in config.items() if other != key})


HOSTILE: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 1e308, -1.5, 0.5, float("inf"), float("nan"), 2**31, 2**63]
HOSTILE += [10**30, "", "a", "\x00", [], {}, [1], [[]], {"a": 1}, [0] * 100, [2**40], {"rope_type": []}, {"type": 3}]


def hostile_rope() -> list[Any]:
    """One bad value in each place of each kind of scaling."""
    kinds = ("linear", "dynamic", "yarn", "longrope", "llama3")
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "beta_fast", "mscale", "short_factor")
    whole = {"factor": 2.0, "original_max_position_embeddings": 16}
    longrope = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return [
        {"rope_type": kind, **whole, **(longrope if kind == "longrope" else {}), name: value}
        for kind in kinds
        for name in names
        for value in HOSTILE
    ]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2_window", "gpt2", "glm", "bloom"])
def test_a_value_that_no_network_has_is_refused_in_words_and_never_takes_long(name: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    changes: list[dict[str, Any]] = [{key: value} for key in config for value in HOSTILE if key != "model_type"]
    changes += (
        []
        if name in ("gpt2", "bloom")
        else [{"rope_parameters": {"rope_theta": 1e4} | rope} for rope in hostile_rope()]
    )
    refused = 0
    for change in changes:
        try:
            decoder = converter.read_config(config | change).decoder()
            if isinstance(decoder.positions, RotaryConfig):
                # What is accepted can be computed: every number of the scaling has been looked at.
                RotaryAngles(decoder.positions)(torch.arange(3))
        except KitforgeError as error:
            assert len(str(error)) < 2000, change
            refused += 1
    assert refused > len(changes) / 4


def test_a_network_of_another_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="dual_chunk"):
        read(LLAMA32 | {"dual_chunk_attention_config": {"chunk_size": 262144}})


def test_a_note_about_the_training_of_yarn_changes_nothing() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(LLAMA32 | {"rope_scaling": yarn | {"finetuned": True}}) == read(LLAMA32 | {"rope_scaling": yarn})


def test_an_unsupported_architecture_is_refused_with_those_that_are() -> None:
    with pytest.raises(ModelError, match=r"got: +mamba\n.*chatglm.*gpt2.*llama.*qwen3"):
        converter_of_type("mamba")


def read(config: dict[str, Any]) -> Any:
    return converter_of_type(config["model_type"]).read_config(config)


def reads(config: dict[str, Any], without: str) -> bool:
    if without == "model_type":
        return True
    try:
        read({key: value for key, value in config.items() if key != without})
    except KitforgeError:
        return False
    return True


def test_each_rate_of_dropout_is_read_from_its_own_key() -> None:
    keys = {
        "gpt2": {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3},
        "pangu_alpha": {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3},
        "bloom": {"attention_dropout": 0.2, "hidden_dropout": 0.3},
    }
    rates = {"embedding_dropout": 0.1, "attention_dropout": 0.2, "residual_dropout": 0.3}
    for family, wanted in keys.items():
        known = {name: rate for name, rate in rates.items() if family != "bloom" or name != "embedding_dropout"}
        sizes = {"vocab_size": 31, "dim": 24, "num_layers": 3, "num_heads": 4}
        config = config_of({"family": family, **sizes, **known})
        written = converter_of(config).write_config(config)
        assert {key: written[key] for key in wanted} == wanted
        assert converter_of(config).read_config(written) == config


# The keys without which no network of a family is described; every other one may be absent.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
REQUIRED: dict[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", _SIZES),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", _SIZES),
    "smollm3": ("SmolLM3Config", _SIZES),
    "gemma3_text": ("Gemma3TextConfig", _SIZES),
    "glm": ("GlmConfig", (*_SIZES, "num_key_value_heads")),
    "glm4": ("Glm4Config", (*_SIZES, "num_key_value_heads")),
    "mixtral": ("MixtralConfig", _SIZES),
    "qwen3_moe": ("Qwen3MoeConfig", _SIZES),
    "gpt2": ("GPT2Config", ("vocab_size", "n_embd", "n_head", "n_layer")),
    "bloom": ("BloomConfig", ("vocab_size", "hidden_size", "n_head", "n_layer")),
    "t5": ("T5Config", ("vocab_size", "d_model", "d_ff", "num_heads", "num_layers")),
    "mt5": ("MT5Config", ("vocab_size", "d_model", "d_ff", "num_heads", "num_layers")),
    "bert": ("BertConfig", _SIZES),
    "roberta": ("RobertaConfig", _SIZES),
    "vit": ("ViTConfig", ("hidden_size", "num_attention_heads", "num_hidden_layers")),
}
# Ours says the same by other options: None is as many heads or layers as of the other kind, or as wide as is left.
FILLED = {
    "num_kv_heads": lambda config: config.num_heads,
    "head_dim": lambda config: config.dim // config.num_heads,
    "num_decoder_layers": lambda config: config.num_layers,
    "decoder_start_id": lambda config: 0,
}
# transformers 5 says of every mT5 that it is tied, and of none what its file lacked; those of version 4 were not.
OWN = {"mt5": {"tie_embeddings", "scale_output"}}


@pytest.mark.parametrize("kind", REQUIRED)
def test_absent_keys_mean_what_transformers_means_by_them(kind: str) -> None:
    name, keys = REQUIRED[kind]
    whole = getattr(transformers, name)()
    given = {key: getattr(whole, key) for key in keys}
    read = converter_of_type(kind).read_config
    short, long = (
        {
            each.name: FILLED[each.name](config) if value is None and each.name in FILLED else value
            for each, value in ((each, getattr(config, each.name)) for each in fields(config))
            if each.name not in OWN.get(kind, ())
        }
        for config in (
            read({"model_type": kind, **given}),
            read({**getattr(transformers, name)(**given).to_dict(), "model_type": kind}),
        )
    )
    assert short == long


def test_absent_keys_of_a_pangu_alpha_are_those_of_its_port() -> None:
    # The defaults of `GPTPanguConfig` in its published configuration_gptpangu.py.
    port = {
        "max_position_embeddings": 1024,
        "intermediate_size": None,
        "activation_function": "gelu",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
    }
    given = {"model_type": "gpt_pangu", "vocab_size": 40000, "hidden_size": 2560, "num_layers": 32, "num_heads": 32}
    read = converter_of_type("gpt_pangu").read_config
    assert read(given) == read(given | port)
    assert read(given).embedding_dropout == read(given).attention_dropout == read(given).residual_dropout == 0.1


def test_positions_that_are_described_twice_are_those_that_transformers_takes() -> None:
    both = LLAMA32 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert read(both) == read(LLAMA32)
    inner = {"rope_type": "default", "rope_theta": 7e4}
    assert read(LLAMA32 | {"rope_scaling": None, "rope_parameters": inner, "rope_theta": 1e4}).rope_theta == 7e4
    # Of two lengths the one beside the scaling wins.
    assert read(LLAMA32 | {"original_max_position_embeddings": 512}).rope_scaling.original_length == 512
