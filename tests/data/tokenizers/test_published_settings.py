"""The generation_config.json and tokenizer_config.json that publishers and tools write are read; other keys are not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kitforge.data.tokenizers.folder import TokenizerFolder
from kitforge.data.tokenizers.generation_config import TARGET_SETTINGS, TEXT_SETTINGS, check_settings
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.loading import load_tokenizer
from kitforge.foundation.errors import DataError
from kitforge.foundation.known_keys import KnownKeys
from tests.tokenizer_folders import write_kind

TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TEXT_FILES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "_from_model_config": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "transformers_version": "4.26.0",
    },
    "llama 2": {
        "_from_model_config": True,
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": 2,
        "max_length": 4096,
        "pad_token_id": 0,
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.31.0.dev0",
    },
    "llama 3": {"bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009], "top_p": 0.9},
    "qwen 2.5": {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "transformers_version": "4.37.0",
    },
    "qwen 2 base": {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048},
    "qwen, first": {"chat_format": "chatml", "eos_token_id": 7, "max_window_size": 6144, "max_new_tokens": 512},
    "gemma 2": {
        "_from_model_config": True,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
    },
    "gemma 3": {"bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
    "phi 3": {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": [32007, 32001, 32000],
        "pad_token_id": 32000,
    },
    "bloom": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
    "glm 4": {
        "do_sample": True,
        "eos_token_id": [151329, 151336],
        "max_length": 128000,
        "temperature": 0.8,
        "top_p": 0.8,
    },
    "smollm 3": {"bos_token_id": 128000, "do_sample": True, "temperature": 0.6, "use_cache": False, "min_p": 0.0},
    "saved by old tools": {
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "constraints": None,
        "diversity_penalty": 0.0,
        "dola_layers": None,
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "exponential_decay_length_penalty": None,
        "forced_bos_token_id": None,
        "guidance_scale": None,
        "is_assistant": False,
        "length_penalty": 1.0,
        "low_memory": None,
        "max_time": None,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_assistant_tokens": 20,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
        "num_beam_groups": 1,
        "num_beams": 1,
        "num_return_sequences": 1,
        "output_attentions": False,
        "penalty_alpha": None,
        "remove_invalid_values": False,
        "renormalize_logits": False,
        "return_dict_in_generate": False,
        "return_legacy_cache": None,
        "sequence_bias": None,
        "stop_strings": None,
        "suppress_tokens": None,
        "target_lookbehind": 10,
        "token_healing": False,
        "trust_remote_code": False,
        "typical_p": 1.0,
        "watermarking_config": None,
        "_commit_hash": "abc",
    },
}
TARGET_FILES: dict[str, dict[str, Any]] = {
    "t5": {"_from_model_config": True, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    "summaries": {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "max_length": 142, "eos_token_id": 2},
}
GENERATIONS = [
    *(pytest.param(each, TEXT_SETTINGS, id=name) for name, each in TEXT_FILES.items()),
    *(pytest.param(each, TARGET_SETTINGS, id=name) for name, each in TARGET_FILES.items()),
]


@pytest.mark.parametrize(("settings", "known"), GENERATIONS)
def test_a_published_way_to_generate_is_taken(settings: dict[str, Any], known: KnownKeys) -> None:
    assert check_settings(settings, known, ()) == settings


COMMON: dict[str, Any] = {"clean_up_tokenization_spaces": False, "model_max_length": 1000000000000000019884624838656}
LISTED = {"added_tokens_decoder": {"0": {**TOKEN, "special": True}}, "bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "sp_model_kwargs": {}, "unk_token": None}
CLASSES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_max_length": 1024},
    "gpt2, in full": {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": {**TOKEN, "__type": "AddedToken"},
        "eos_token": {**TOKEN, "content": "</s>", "__type": "AddedToken"},
        "errors": "replace",
        "name_or_path": "gpt2",
        "special_tokens_map_file": None,
        "tokenizer_class": "GPT2Tokenizer",
        "tokenizer_file": "/somewhere/tokenizer.json",
    },
    "llama 2": {
        **LLAMA,
        "bos_token": {**TOKEN, "__type": "AddedToken"},
        "chat_template": "{{ messages }}",
        "pad_token": None,
        "padding_side": "right",
        "tokenizer_class": "LlamaTokenizer",
        "use_default_system_prompt": False,
        "spaces_between_special_tokens": False,
    },
    "llama 3": {
        **LISTED,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "</s>",
    },
    "qwen": {
        **LISTED,
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<s>", "</s>"],
        "bos_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    },
    "gemma": {
        **LISTED,
        **LLAMA,
        "boi_token": "<s>",
        "eoi_token": "</s>",
        "extra_special_tokens": {"image_token": "<s>", "boi_token": "<s>"},
        "image_token": "<s>",
        "processor_class": "Gemma3Processor",
        "tokenizer_class": "GemmaTokenizer",
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "x"}],
    },
    "phi": {
        **LISTED,
        **LLAMA,
        "padding_side": "left",
        "tokenizer_class": "LlamaTokenizer",
        "return_token_type_ids": False,
    },
    "smollm": {**LISTED, "fast": False, "extra_special_tokens": [], "backend": "tokenizers", "is_local": True},
    "t5": {
        "additional_special_tokens": ["<s>"],
        "eos_token": "</s>",
        "extra_ids": 100,
        "pad_token": "<s>",
        "sp_model_kwargs": {},
        "tokenizer_class": "T5Tokenizer",
        "legacy": True,
        "max_length": 512,
        "stride": 0,
        "truncation_strategy": "longest_first",
    },
    "bloom": {"padding_side": "left", "add_prefix_space": False, "tokenizer_class": "BloomTokenizerFast"},
    "glm": {
        **LISTED,
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "do_lower_case": False,
        "encode_special_tokens": True,
        "eod_token": "</s>",
        "image_size": 1120,
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "ChatGLM4Tokenizer",
    },
    "mistral": {**LLAMA, "add_prefix_space": None, "tokenizer_class": "LlamaTokenizer", "use_fast": True},
    "bert": {
        "cls_token": "<s>",
        "do_basic_tokenize": True,
        "do_lower_case": False,
        "mask_token": "<s>",
        "never_split": None,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        "tokenizer_class": "BertTokenizer",
    },
    "truncating": {
        "truncation_side": "right",
        "pad_token_type_id": 0,
        "pad_to_multiple_of": None,
        "local_files_only": False,
        "trust_remote_code": False,
        "_name_or_path": "x",
        "tokenizer_version": "v3",
        "transformers_version": "5.0.0",
    },
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_published_tokenizer_config_is_read(tmp_path: Path, name: str) -> None:
    folder = write_kind("llama3", tmp_path / "tokenizer")
    tokens = load_tokenizer(folder).encode("Beautiful is")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config | COMMON | CLASSES[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode("Beautiful is") == tokens


@pytest.mark.parametrize(
    ("key", "value"),
    [("frobnicate_spaces", True), ("add_prefix_spaces", True), ("lower", "yes"), ("dropout", 0.1)],
)
def test_an_unknown_key_is_refused_with_file_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(DataError, match=rf"(?s)tokenizer_config.json.*{key}={value}"):
        TokenizerFolder({"tokenizer_config.json": json.dumps({key: value}).encode()})
    TokenizerFolder({"tokenizer_config.json": json.dumps({key: None}).encode()})


def folder_of(folder: Path, normalizer: Any = None, config: Any = None, *, prefix: bool = False) -> Path:
    write_kind("llama3", folder)
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    if normalizer is not None:
        pieces.normalizer = normalizer
    pieces.save(str(folder / "tokenizer.json"))
    kept = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(kept | (config or {})))
    return folder


LOWER = normalizers.Lowercase()
BARE = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
CUTS: list[tuple[str, Any, Any, bool, str]] = [
    ("do_lower_case", True, None, False, "PreTrainedTokenizerFast"),
    ("do_lower_case", True, BARE, False, "LlamaTokenizerFast"),
    ("do_lower_case", False, LOWER, False, "BertTokenizerFast"),
    ("strip_accents", True, LOWER, False, "PreTrainedTokenizerFast"),
    ("add_prefix_space", True, None, False, "GPT2Tokenizer"),
    ("add_prefix_space", False, None, True, "Qwen2TokenizerFast"),
    ("sp_model_kwargs", {"enable_sampling": True, "alpha": 0.1}, None, False, "LlamaTokenizer"),
]


@pytest.mark.parametrize(("key", "value", "normalizer", "prefix", "named"), CUTS, ids=str)
def test_a_key_that_would_cut_texts_otherwise_is_refused(
    tmp_path: Path, key: str, value: Any, normalizer: Any, prefix: bool, named: str
) -> None:
    config = {key: value, "tokenizer_class": named}
    folder = folder_of(tmp_path / "folder", normalizer, config, prefix=prefix)
    with pytest.raises(DataError, match=rf"(?s)tokenizer_config.json.*{key}="):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("key", "value", "normalizer", "prefix"),
    [
        ("do_lower_case", True, LOWER, False),
        ("do_lower_case", True, normalizers.BertNormalizer(lowercase=True), False),
        ("strip_accents", True, BARE, False),
        ("add_prefix_space", True, None, True),
        ("sp_model_kwargs", {"enable_sampling": False}, None, False),
    ],
    ids=str,
)
def test_a_key_that_says_what_the_vocabulary_does_is_read(
    tmp_path: Path, key: str, value: Any, normalizer: Any, prefix: bool
) -> None:
    assert load_tokenizer(folder_of(tmp_path / "folder", normalizer, {key: value}, prefix=prefix)).encode("a")


def test_metaspace_counts_as_a_prefix(tmp_path: Path) -> None:
    pieces = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "\u2581a": 2, "<unk>": 3}, unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    pieces.decoder = decoders.Metaspace(prepend_scheme="first")
    for asked in (True, None):
        config = {"eos_token": "</s>", "add_prefix_space": asked, "tokenizer_class": "LlamaTokenizer"}
        files = {"tokenizer.json": pieces.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
        assert HuggingFaceTokenizer(files).encode("a") == [2]


def test_flags_of_ends_that_tokenizer_json_does_not_obey_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path / "folder", config={"add_bos_token": True, "add_eos_token": True})
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(folder).encode_prompt("a")[0] == 0
    [told] = [each.getMessage() for each in caplog.records]
    assert "add_eos_token=True" in told
