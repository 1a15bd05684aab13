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

LINES = Path(__file__).with_name("published_settings.jsonl").read_text(encoding="utf-8").splitlines()
PUBLISHED: list[dict[str, Any]] = [*map(json.loads, LINES)]
KNOWN = {"texts": TEXT_SETTINGS, "targets": TARGET_SETTINGS}
GENERATIONS = [
    pytest.param(each["settings"], KNOWN[each["kind"]], id=each["name"]) for each in PUBLISHED if each["kind"] in KNOWN
]
CLASSES = {each["name"]: each["settings"] for each in PUBLISHED if each["kind"] == "tokenizer"}


@pytest.mark.parametrize(("settings", "known"), GENERATIONS)
def test_a_published_way_to_generate_is_taken(settings: dict[str, Any], known: KnownKeys) -> None:
    assert check_settings(settings, known, ()) == settings


COMMON: dict[str, Any] = {"clean_up_tokenization_spaces": False, "model_max_length": 1000000000000000019884624838656}


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
