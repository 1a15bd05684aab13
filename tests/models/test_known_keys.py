"""A key of config.json is obeyed, changes nothing, or is refused with file, key, value and what is accepted."""

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from kitforge.foundation.errors import ModelError
from kitforge.models import loading
from kitforge.models.catalog import FAMILIES, converter_of_type
from tests.models.conftest import GetPeer
from tests.models.variants import converter_and_config, largest_difference, logits_of, ours_from, tokens

TYPES = [kind for each in FAMILIES.values() if each.convert for kind in each.convert.model_types]
# Chatglm and PanGu-alpha are none of transformers'.
PEERS = [kind for kind in TYPES if kind in CONFIG_MAPPING and kind not in ("chatglm", "gpt_pangu")]
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "n_embd": 64, "n_layer": 2, "n_head": 4}


def default_file(kind: str) -> dict[str, Any]:
    """What transformers writes for its default options, all of them."""
    config = CONFIG_MAPPING[kind]()
    extra = {"tie_word_embeddings": False} if kind == "mt5" else {}
    return {**config.to_dict(), "is_encoder_decoder": kind in ("t5", "mt5"), **extra}


@pytest.mark.parametrize("kind", PEERS)
def test_every_default_of_transformers_is_read(kind: str) -> None:
    converter_of_type(kind).read_config(default_file(kind))


# Of published files, of their trainers, and of transformers before version 5.
HARMLESS: dict[str, Any] = {
    "_name_or_path": "some/model",
    "_attn_implementation_autoset": True,
    "architectures": ["AnyForCausalLM"],
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "transformers_version": "4.37.0",
    "unsloth_version": "2025.1",
    "unsloth_fixed": True,
    "tokenizer_model_max_length": 2048,
    "tokenizer_padding_side": "right",
    "pad_token": "<pad>",
    "neftune_noise_alpha": 5,
    "use_flash_attention_2": True,
    "auto_map": {"AutoModel": "modeling.Model"},
    "use_cache": False,
    "pretraining_tp": 2,
    "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    "output_attentions": True,
    "output_past": True,
    "initializer_range": 0.5,
    "gradient_checkpointing": True,
    "classifier_dropout": 0.2,
    "hidden_dropout_prob": 0.1,
    "bos_token_id": 7,
    "eos_token_id": [1, 2],
    "do_sample": True,
    "temperature": 0.6,
    "max_length": 50,
    "num_beams": 4,
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1},
    "finetuning_task": "sst2",
    "transformers.js_config": {"dtype": "q4"},
    "quantization_config": None,
    "pruned_heads": {},
    "a_switch_that_is_off": False,
    "an_option_without_a_value": None,
}


@pytest.mark.parametrize("key", HARMLESS)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3", "gpt2", "bloom", "glm"])
def test_a_key_that_changes_nothing_is_accepted(name: str, key: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    assert converter.read_config(config | {key: HARMLESS[key]}) is not None


HARMFUL: dict[str, Any] = {
    "is_causal": False,
    "add_cross_attention": True,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "quantization": {"group_size": 64, "bits": 4},
    "attention_multiplier": 0.5,
    "logit_scale": 0.1,
    "final_logit_softcapping_of_another": 30.0,
    "position_embedding_type": "alibi",
    "use_parallel_residual": True,
    "pruned_heads": {"0": [1]},
}


@pytest.mark.parametrize("key", HARMFUL)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3", "gpt2", "bloom", "glm"])
def test_a_key_that_we_do_not_know_is_refused(name: str, key: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    with pytest.raises(ModelError, match=rf"(?s)config.json.*got: +{key}=.*expected: .*{'|null' if key else ''}"):
        converter.read_config(config | {key: HARMFUL[key]})


@pytest.mark.parametrize("kind", ["t5", "vit"])
@pytest.mark.parametrize("key", ["quantization_config", "attention_multiplier", "use_parallel_residual"])
def test_an_unknown_key_of_other_networks_is_refused(kind: str, key: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s)config.json.*got: +{key}="):
        converter_of_type(kind).read_config(default_file(kind) | {key: HARMFUL[key]})


@pytest.mark.parametrize("change", [{"dense_act_fn": "silu"}, {"is_gated_act": True}])
def test_an_activation_of_t5_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change))):
        converter_of_type("t5").read_config(default_file("t5") | change)


@pytest.mark.parametrize(
    "types", [["full_attention", "sliding_attention"], ["sliding_attention"] * 2, ["full_attention"] * 2]
)
def test_layer_types_of_a_mistral_are_obeyed(types: list[str], peer: GetPeer, tmp_path: Any) -> None:
    source = peer("mistral")
    config = transformers.AutoConfig.from_pretrained(source.folder)
    config.layer_types = types
    source.model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "MinistralForCausalLM"
    assert largest_difference(logits_of(ours_from(tmp_path), tokens()), logits_of(theirs, tokens())) < 1e-4


@pytest.mark.parametrize("types", [["full_attention", "sliding_attention"], ["full_attention"] * 2], ids=str)
def test_a_mistral_with_layer_types_is_exported_as_it_was_read(types: list[str], peer: GetPeer, tmp_path: Any) -> None:
    source = peer("mistral")
    source.model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"layer_types": types}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    loading.save(ours_from(tmp_path / "source"), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["model_type"], written["layer_types"]) == ("mistral", types)
    ours, theirs = ours_from(tmp_path / "again"), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert largest_difference(logits_of(ours, tokens()), logits_of(theirs, tokens())) < 1e-4
    assert ours.config == ours_from(tmp_path / "source").config


def test_layer_types_of_a_llama_change_nothing(peer: GetPeer) -> None:
    converter, config = converter_and_config(peer("llama"))
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig.from_dict(config | windows))
    theirs.load_state_dict(peer("llama").model.state_dict())
    with torch.no_grad():
        assert largest_difference(theirs(tokens()).logits, logits_of(peer("llama").model, tokens())) < 1e-6
    assert converter.read_config(config | windows) == converter.read_config(config)


@pytest.mark.parametrize(
    ("name", "alias", "key"), [("gpt2", "hidden_size", "n_embd"), ("bloom", "num_attention_heads", "n_head")]
)
def test_a_key_under_another_name_is_read_and_may_not_disagree(name: str, alias: str, key: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    renamed = {alias if each == key else each: value for each, value in config.items()}
    assert converter.read_config(renamed) == converter.read_config(config)
    assert converter.read_config(config | {alias: config[key]}) == converter.read_config(config)
    with pytest.raises(ModelError, match=alias):
        converter.read_config(config | {alias: 3})
