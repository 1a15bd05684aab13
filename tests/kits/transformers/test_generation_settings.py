"""How the publisher of a model generates is kept and obeyed: ends, start tokens and the repetition penalty."""

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from kitforge import Trainer, load_processor, pipeline, save_model
from kitforge.data.chat.template import template_of
from kitforge.data.source import open_source
from kitforge.data.tokenizers.gguf import tokenizer_metadata
from kitforge.data.tokenizers.loading import ByteTokenizer, Tokenizer, TokenizerConfig, load_tokenizer, make_tokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.registry import kit_of
from kitforge.models import loading
from kitforge.report.config_diff import notes
from kitforge.report.page import write_report
from tests.small_run import TEXT, WITHOUT_MODEL
from tests.tiny import built
from tests.tokenizer_folders import CORPUS, write_kind

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


def network(family: str) -> Any:
    model = built(FAMILIES[family], SIZES["vocab_size"], family=family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1)
    return model


def tokenizer_of(kind: str, folder: Path, settings: dict[str, Any] | None = SETTINGS) -> Tokenizer:
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
    if settings is not None:
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def published(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((folder / "generation_config.json").read_text()))


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "json") for family in FAMILIES), ("llama", "model"), ("t5", "model"), ("t5", "bytes")],
)
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
        save_model(built(FAMILIES["llama"], 320, family="llama"), tmp_path / f"{kind}.gguf", tokenizer)
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


# Beside those that are drawn in tests/differential.
REFUSED: list[dict[str, Any]] = [
    {"penalty_alpha": 0.6, "top_k": 4},
    {"encoder_repetition_penalty": 1.2},
    {"num_beems": 2},
    {"some_rule": "on"},
]
HARMLESS: list[dict[str, Any]] = [
    {"early_stopping": True, "length_penalty": 2.0, "suppress_tokens": [], "min_length": 0, "use_cache": False},
    {"no_repeat_ngram_size": 0, "num_beams": 1, "encoder_repetition_penalty": 1.0, "bad_words_ids": None},
    {"some_rule": None},
]


def told_folder(folder: Path, settings: dict[str, Any], family: str = "llama") -> Path:
    save_model(network(family), folder, ByteTokenizer())
    tokens = {"decoder_start_token_id": ByteTokenizer().pad_id, "eos_token_id": ByteTokenizer().eos_id}
    (folder / "generation_config.json").write_text(json.dumps((tokens if family == "t5" else {}) | settings))
    return folder


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_a_setting_that_is_not_computed_is_refused_where_texts_are_generated(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = told_folder(tmp_path / "folder", settings)
    key = next(iter(settings))
    with pytest.raises(DataError, match="generation_config.json") as refused:
        pipeline("text_generation", str(folder))
    assert f"{key}=" in str(refused.value) and f"inference.ignored_settings=[{key}]" in str(refused.value)
    generate = pipeline(
        "text_generation", str(folder), options={"inference.ignored_settings": [key], "inference.max_new_tokens": 4}
    )
    assert generate("Beautiful")


@pytest.mark.parametrize("settings", HARMLESS, ids=str)
def test_a_setting_that_changes_no_text_is_taken_without_a_word(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = told_folder(tmp_path / "folder", settings)
    with caplog.at_level(logging.WARNING):
        assert pipeline("text_generation", str(folder), options={"inference.max_new_tokens": 4})("Beautiful")
    assert not caplog.records


@pytest.mark.parametrize(
    "settings", [{"num_beams": 4, "no_repeat_ngram_size": 3}, {"begin_suppress_tokens": [4, 5]}], ids=str
)
def test_a_folder_with_such_a_setting_is_trained_and_exported_with_it(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = told_folder(tmp_path / "folder", settings)
    (tmp_path / "corpus.txt").write_text(CORPUS[0])
    options = WITHOUT_MODEL | {
        "data.cache": str(tmp_path / "cache"),
        "trainer.max_steps": 1,
        "trainer.eval_every": 1,
        "checkpoint": str(folder),
    }
    run = Trainer("text_generation", None, tmp_path / "corpus.txt", output_dir=tmp_path / "run", options=options)
    with caplog.at_level(logging.WARNING):
        trained = run.train().folder
    key, value = next(iter(settings.items()))
    assert any(f"{key}={value!r}" in each.getMessage() for each in caplog.records)
    save_model(trained, tmp_path / "exported")
    assert published(tmp_path / "exported") == settings
    with pytest.raises(DataError, match=key):
        pipeline("text_generation", str(trained))


# What texts are generated by, as a folder has it, and what undoes it.
TOLD: dict[str, tuple[Any, dict[str, Any]]] = {
    "repetition_penalty": (3.0, {"repetition_penalty": 1.0}),
    "suppress_tokens": ([*range(0, 256, 2)], {"suppress_tokens": ()}),
    # Of which the prompt writes the first token.
    "bad_words_ids": ([[ord("l"), token] for token in range(3, 256)], {"suppress_tokens": (), "bad_words": ()}),
    "stop_strings": (["\ufffd"], {"stop": ("never",)}),
}


@pytest.mark.parametrize(
    ("key", "name"), [*((key, "generation_config.json") for key in TOLD), ("repetition_penalty", "config.json")]
)
def test_what_is_given_comes_before_what_the_folder_says(tmp_path: Path, key: str, name: str) -> None:
    folder, (told, given) = told_folder(tmp_path / "folder", {}), TOLD[key]
    if name == "config.json":
        (folder / "generation_config.json").unlink()

    def text(options: dict[str, Any], **chosen: Any) -> Any:
        named = {f"inference.{key}": value for key, value in options.items()} | {"inference.max_new_tokens": 12}
        return pipeline("text_generation", str(folder), options=named)("Beautiful", **chosen)[0]["generated_text"]

    plain, config = text({}), json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(config | {key: told}))
    options = {key: value for key, value in given.items() if key != "bad_words"}
    assert text({}) != plain == text({}, **given) == text(options)


@pytest.mark.parametrize(
    "settings",
    [{"stop_strings": [3]}, {"suppress_tokens": ["a"]}, {"suppress_tokens": 4.5}, {"bad_words_ids": "x"}],
    ids=str,
)
def test_settings_that_are_no_tokens_or_strings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="generation_config.json"):
        pipeline("text_generation", str(told_folder(tmp_path / "folder", settings)))


def test_a_number_of_new_tokens_that_is_given_comes_before_that_of_the_folder(tmp_path: Path) -> None:
    folder = told_folder(tmp_path / "folder", {"min_new_tokens": 30, "min_length": 40})
    assert pipeline("text_generation", str(folder), options={"inference.min_new_tokens": 1})("Beautiful")


def test_ignored_settings_are_no_option_of_a_single_call(tmp_path: Path) -> None:
    generate = pipeline("text_generation", str(told_folder(tmp_path / "folder", {"repetition_penalty": 1.2})))
    with pytest.raises(ConfigError, match="ignored_settings"):
        generate("Beautiful", ignored_settings=("repetition_penalty",))


def test_targets_are_searched_with_the_beams_of_the_folder(tmp_path: Path) -> None:
    settings = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}
    folder = told_folder(tmp_path / "folder", settings, "t5")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = load_processor(folder)
    source = torch.tensor([tokenizer.encode_prompt("Beautiful is") + [tokenizer.eos_id]])
    for given, asked in ({}, {}), ({"inference.num_beams": 1}, {"num_beams": 1, "early_stopping": False}):
        found = theirs.generate(source, max_new_tokens=9, do_sample=False, **asked)[0, 1:].tolist()
        translate = pipeline("translation", str(folder), options={"inference.max_new_tokens": 9, **given})
        assert translate("Beautiful is") == [{"translation_text": tokenizer.decode(found)}]


def test_a_setting_of_targets_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    settings = {"no_repeat_ngram_size": 3, "min_length": 56, "forced_bos_token_id": 0, "num_beams": 2}
    folder = told_folder(tmp_path / "folder", settings, "t5")
    with pytest.raises(DataError, match="no_repeat_ngram_size=3"):
        pipeline("translation", str(folder))("Beautiful")
    named = {"inference.ignored_settings": [*settings], "inference.max_new_tokens": 3}
    assert pipeline("translation", str(folder), options=named)("Beautiful")


@pytest.mark.parametrize("penalty", ["1.1", 0, -1.0, True])
def test_an_impossible_penalty_is_refused(tmp_path: Path, penalty: Any) -> None:
    tokenizer_of("bytes", tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty}))
    with pytest.raises(DataError, match="repetition_penalty"):
        pipeline("text_generation", network("llama"), processor=load_tokenizer(tmp_path / "source"))


def served_sampling(folder: Path, settings: dict[str, Any], **chosen: Any) -> tuple[Any, ...]:
    tokenizer_of("bytes", folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    kit = kit_of("text_generation")
    options = kit.read_options({"inference": {**chosen, "engine": {"kv_cache_bytes": 100_000}}})
    used = kit.open_service(network("llama"), load_tokenizer(folder), "llama", options).defaults
    return used.temperature, used.top_p, used.top_k, used.min_p


@pytest.mark.parametrize(
    ("settings", "chosen", "expected"),
    [
        ({}, {}, (1.0, None, None, None)),
        (SETTINGS, {}, (0.6, 0.9, 20, None)),
        (SETTINGS | {"do_sample": False}, {}, (0.0, 0.9, 20, None)),
        (SETTINGS | {"do_sample": False}, {"temperature": 0.5}, (0.5, 0.9, 20, None)),
        (SETTINGS, {"temperature": 0}, (0, 0.9, 20, None)),
        (SETTINGS, {"top_p": 0.5, "top_k": 3}, (0.6, 0.5, 3, None)),
        (SETTINGS, {"ignored_settings": ["top_k"]}, (0.6, 0.9, None, None)),
        ({"top_k": 0, "min_p": 0.1, "top_p": 1}, {}, (1.0, 1, None, 0.1)),
        ({"temperature": 0.7, "top_p": 0}, {}, (0.0, None, None, None)),
    ],
    ids=str,
)
def test_a_server_samples_as_the_folder_says_where_nothing_else_is_chosen(
    tmp_path: Path, settings: dict[str, Any], chosen: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert served_sampling(tmp_path / "folder", settings, **chosen) == expected


@pytest.mark.parametrize("settings", [{"temperature": "hot"}, {"top_k": 2.5}, {"top_p": 1.5}, {"min_p": True}], ids=str)
def test_impossible_sampling_is_refused_by_a_server_and_may_be_ignored(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(DataError, match=f"impossible {name}"):
        served_sampling(tmp_path / "folder", settings)
    assert served_sampling(tmp_path / "other", settings, ignored_settings=[name])[0] == 1.0


def test_warnings_about_the_inputs_stand_in_the_configuration_and_the_report_of_every_run(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    save_model(network("llama"), tmp_path / "source", tokenizer_of("bytes", tmp_path / "bytes"))
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"frobnicate": "<7>"}))
    options = {**WITHOUT_MODEL, "trainer.max_steps": 1}
    for name in ("first", "second"):
        folder = tmp_path / name
        Trainer(
            "text_generation", str(tmp_path / "source"), tmp_path / "corpus.txt", output_dir=folder, options=options
        ).train()
        [told] = [note for note in notes((folder / "config.yaml").read_text()) if "frobnicate" in note]
        assert "frobnicate='<7>'" in told
        assert "frobnicate=&#x27;&lt;7&gt;" in write_report([folder]).read_text().split("<h2")[0]
