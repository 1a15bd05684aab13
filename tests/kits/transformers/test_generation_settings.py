"""How the publisher of a model generates is kept and obeyed: ends, start tokens and the repetition penalty."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from kitforge import Trainer, load_processor, pipeline, save_model
from kitforge.data.gguf_tokenizer import tokenizer_metadata
from kitforge.data.source import open_source
from kitforge.data.template import template_of
from kitforge.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerConfig, load_tokenizer, make_tokenizer
from kitforge.foundation.errors import DataError
from kitforge.models import loading
from kitforge.models.catalog import config_of
from kitforge.report.config_diff import notes
from kitforge.report.page import write_report
from tests.small_run import TEXT, WITHOUT_MODEL
from tests.tokenizer_folders import CORPUS, write_kind

CPU = torch.device("cpu")
SETTINGS = {
    "eos_token_id": [1, 3, 5, 7],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.3,
    "transformers_version": "4.40.1",
}
SIZES = {"vocab_size": 300, "dim": 32, "num_layers": 2, "num_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "mlp_dim": 48},
    "gpt2": SIZES,
    "bloom": SIZES,
    "glm": {**SIZES, "mlp_dim": 48, "num_kv_heads": 1},
    "t5": {**SIZES, "mlp_dim": 48, "head_dim": 16},
}
TEXTS = ["Beautiful is better", "a\nb", "\u00e9\U0001f336 two  spaces"]


def network(family: str, seed: int = 3) -> Any:
    model = loading.build(config_of({"family": family, **FAMILIES[family]}), device=CPU, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1)
    return model


def tokenizer_of(kind: str, folder: Path) -> Tokenizer:
    """A tokenizer of the kind with the publisher's settings beside it."""
    if kind == "json":
        write_kind("llama3", folder)
    elif kind == "bytes":
        folder.mkdir()
        ByteTokenizer().save(folder)
    else:
        folder.mkdir()
        config = TokenizerConfig(name="sentencepiece", vocab_size=290)
        make_tokenizer(config, open_source(CORPUS), folder.parent / "cache").save(folder)
    (folder / "generation_config.json").write_text(json.dumps(SETTINGS))
    return load_tokenizer(folder)


def published(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / "generation_config.json").read_text()))


@pytest.mark.parametrize("kind", ["json", "model", "bytes"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_settings_and_the_tokens_for_transformers(tmp_path: Path, family: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "source")
    save_model(network(family), tmp_path / "first", tokenizer)
    save_model(tmp_path / "first", tmp_path / "again")
    start = {"decoder_start_token_id": tokenizer.pad_id} if family == "t5" else {}
    for folder in (tmp_path / "first", tmp_path / "again"):
        assert published(folder) == SETTINGS | start
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert {theirs.eos_token_id, *generation.eos_token_id} == set(tokenizer.eos_ids)
        assert generation.repetition_penalty == 1.3 and generation.top_k == 20
        assert load_processor(folder).eos_ids == tokenizer.eos_ids


@pytest.mark.parametrize("kind", ["json", "model", "bytes"])
def test_a_gguf_file_keeps_every_end_and_every_setting(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "source")
    save_model(network("llama"), tmp_path / "model.gguf", tokenizer)
    assert load_processor(tmp_path / "model.gguf").eos_ids == tokenizer.eos_ids
    save_model(tmp_path / "model.gguf", tmp_path / "folder")
    assert published(tmp_path / "folder") == SETTINGS | {"eos_token_id": list(tokenizer.eos_ids)}
    assert load_processor(tmp_path / "folder").encode_prompt(TEXTS[0]) == tokenizer.encode_prompt(TEXTS[0])


def test_added_tokens_and_templates_beside_a_vocabulary_are_written_into_a_gguf_file(tmp_path: Path) -> None:
    for kind, source in (("json", tmp_path / "json"), ("model", tmp_path / "model")):
        number = tokenizer_of(kind, source).vocab_size
        entry = {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        config = {"added_tokens_decoder": {str(number): entry | {"single_word": False}}, "eos_token": "<|im_end|>"}
        templates = [
            {"name": name, "template": name + "{{ messages[0].content }}<|im_end|>"} for name in ("default", "tool_use")
        ]
        (source / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
        tokenizer = load_tokenizer(source)
        model = loading.build(
            config_of({"family": "llama", **FAMILIES["llama"], "vocab_size": 320}), device=CPU, seed=1
        )
        save_model(model, tmp_path / f"{kind}.gguf", tokenizer)
        again = load_processor(tmp_path / f"{kind}.gguf")
        assert again.eos_id == number
        for tools in (None, [{"name": "is"}]):
            talk = [{"role": "user", "content": "Beautiful"}]
            found = [template_of(each).tokens(talk, tools=tools) for each in (tokenizer, again)]
            assert found[0] == found[1] and found[0][-1] == number


def test_an_end_beyond_the_vocabulary_hinders_nothing(tmp_path: Path) -> None:
    save_model(network("llama"), tmp_path / "folder", ByteTokenizer())
    (tmp_path / "folder" / "generation_config.json").write_text('{"eos_token_id": [50256, 7]}')
    save_model(tmp_path / "folder", tmp_path / "model.gguf")
    for path in (tmp_path / "folder", tmp_path / "model.gguf"):
        assert load_processor(path).eos_ids[:1] == (256,) and {7, 50256} < set(load_processor(path).eos_ids)
        generate = pipeline("text_generation", str(path), options={"inference.max_new_tokens": 3})
        assert generate("Beautiful", min_new_tokens=2)


def test_the_settings_that_llama_cpp_writes_are_read(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    entries = tokenizer_metadata(ByteTokenizer(), 300)
    entries |= {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    loading.save(network("llama"), tmp_path / "model.gguf", extra=entries | {"tokenizer.ggml.eom_token_id": 7})
    found = load_processor(tmp_path / "model.gguf")
    assert found.eos_ids == (256, 7)
    settings = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert found.generation_config == settings | {"eos_token_id": [256, 7]}


def test_another_model_in_the_folder_leaves_no_settings_behind(tmp_path: Path) -> None:
    save_model(network("llama"), tmp_path / "folder", tokenizer_of("bytes", tmp_path / "source"))
    save_model(network("gpt2"), tmp_path / "folder", ByteTokenizer())
    assert load_processor(tmp_path / "folder").eos_ids == (256,)


def test_a_run_keeps_the_settings_and_its_export_too(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("json", tmp_path / "source")
    save_model(network("llama"), tmp_path / "folder", tokenizer)
    (tmp_path / "corpus.txt").write_text(CORPUS[0])
    options = WITHOUT_MODEL | {
        "data.cache": str(tmp_path / "cache"),
        "trainer.max_steps": 1,
        "checkpoint": str(tmp_path / "folder"),
    }
    run = Trainer("text_generation", None, tmp_path / "corpus.txt", output_dir=tmp_path / "run", options=options)
    folder = run.train().folder
    save_model(folder, tmp_path / "exported")
    assert load_processor(folder).eos_ids == load_processor(tmp_path / "exported").eos_ids == tokenizer.eos_ids
    assert published(tmp_path / "exported") == SETTINGS


@pytest.mark.parametrize("penalty", [1.5, 3.0])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_greedy_texts_have_the_penalty_of_the_folder(tmp_path: Path, name: str, penalty: float) -> None:
    folder = tmp_path / "folder"
    save_model(network("llama"), folder, load_tokenizer(write_kind("llama3", tmp_path / "source")))
    content = json.loads((folder / name).read_text()) if name == "config.json" else {"eos_token_id": 1}
    (folder / name).write_text(json.dumps(content | {"repetition_penalty": penalty}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = load_processor(folder)
    generate = pipeline("text_generation", str(folder), options={"inference.max_new_tokens": 12})
    tokens = torch.tensor([tokenizer.encode_prompt("Beautiful is")])
    for choices, wanted in ({}, penalty), ({"repetition_penalty": 1.0}, 1.0), ({"repetition_penalty": 2.0}, 2.0):
        found = theirs.generate(tokens, do_sample=False, max_new_tokens=12, repetition_penalty=wanted, pad_token_id=1)
        text = tokenizer.decode(found[0, tokens.shape[1] :].tolist())
        assert generate("Beautiful is", **choices)[0]["generated_text"] == "Beautiful is" + text
        named = {f"inference.{key}": value for key, value in choices.items()} | {"inference.max_new_tokens": 12}
        again = pipeline("text_generation", str(folder), options=named)
        assert again("Beautiful is")[0]["generated_text"] == "Beautiful is" + text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_repeat_ngram_size": 3, "num_beams": 1, "temperature": 0.6, "top_k": 9}, "no_repeat_ngram_size=3"),
        ({"forced_bos_token_id": 4}, "forced_bos_token_id=4"),
        ({"suppress_tokens": [1], "max_length": 20}, "suppress_tokens=[1]"),
        ({"num_beams": 4, "early_stopping": True}, "early_stopping=True, num_beams=4"),
        ({"chat_format": "chatml"}, "chat_format='chatml'"),
        ({"early_stopping": True, "length_penalty": 2.0, "suppress_tokens": [], "min_length": 0, "use_cache": 0}, None),
    ],
    ids=str,
)
def test_what_is_not_obeyed_is_named_once(
    tmp_path: Path, settings: dict[str, Any], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer_of("bytes", tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pipeline("text_generation", network("llama"), processor=load_tokenizer(tmp_path / "source"))
    told = [each.getMessage().split(": ")[-1] for each in caplog.records]
    assert told == ([] if named is None else [named])


@pytest.mark.parametrize("penalty", ["1.1", 0, -1.0, True])
def test_an_impossible_penalty_is_refused(tmp_path: Path, penalty: Any) -> None:
    tokenizer_of("bytes", tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty}))
    with pytest.raises(DataError, match="repetition_penalty"):
        pipeline("text_generation", network("llama"), processor=load_tokenizer(tmp_path / "source"))


def test_warnings_about_the_inputs_stand_in_the_configuration_and_the_report_of_every_run(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    save_model(network("llama"), tmp_path / "source", tokenizer_of("bytes", tmp_path / "bytes"))
    config = tmp_path / "source" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "frobnicate_spaces": "<7>"}))
    options = {**WITHOUT_MODEL, "trainer.max_steps": 1}
    for name in ("first", "second"):
        folder = tmp_path / name
        Trainer(
            "text_generation", str(tmp_path / "source"), tmp_path / "corpus.txt", output_dir=folder, options=options
        ).train()
        [told] = [note for note in notes((folder / "config.yaml").read_text()) if "frobnicate" in note]
        assert "{'frobnicate_spaces': '<7>'}" in told
        assert "frobnicate_spaces&#x27;: &#x27;&lt;7&gt;" in write_report([folder]).read_text().split("<h2")[0]
