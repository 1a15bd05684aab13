"""Special tokens, added tokens and templates beside a vocabulary are those that `transformers` finds in the folder."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    find_tokenizer,
    load_tokenizer,
)
from kitforge.foundation.errors import DataError
from tests.tokenizer_folders import CORPUS, byte_level

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
INST = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}{{ eos_token }}"
TALK = [{"role": "user", "content": "Beautiful is"}, {"role": "user", "content": " better"}]


@pytest.fixture(scope="module")
def model() -> bytes:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS[0].splitlines(), "[INST] user assistant [/INST]"]),
        model_writer=file,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return file.getvalue()


def added(content: str, *, special: bool = True) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content, "special": special, **flags}


def write(folder: Path, **files: Any) -> Path:
    """Files by name without their ending: texts are templates, bytes models."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        ending = "model" if isinstance(content, bytes) else "jinja" if isinstance(content, str) else "json"
        text = content if isinstance(content, (bytes, str)) else json.dumps(content)
        (folder / f"{name}.{ending}").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def write_bytes_level(folder: Path, special: list[str], **files: Any) -> Path:
    write(folder, **files)
    byte_level(special).save(str(folder / "tokenizer.json"))
    return folder


def ids(theirs: Any, talk: list[dict[str, str]], **inputs: Any) -> list[int]:
    return list(theirs.apply_chat_template(talk, tokenize=True, return_dict=False, **inputs))


@pytest.mark.parametrize("ends", [1, [0, 1], [1, 0, 7]])
@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model", "bytes"])
def test_a_text_ends_with_the_tokens_of_the_tokenizer_and_of_the_folder(
    tmp_path: Path, model: bytes, kind: str, name: str, ends: Any
) -> None:
    folder = write(tmp_path / "folder", **{name: {"model_type": "llama", "eos_token_id": ends}})
    own = {"tokenizer.json": 1, "tokenizer.model": 2, "bytes": 256}[kind]
    if kind == "tokenizer.json":
        write_bytes_level(folder, ["<s>", "</s>"], tokenizer_config={"eos_token": "</s>"})
    elif kind == "tokenizer.model":
        write(folder, tokenizer=model)
    else:
        write(folder, kitforge_tokenizer={"kind": "byte"})
    several = ends if isinstance(ends, list) else [ends]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == tuple(dict.fromkeys([own, *several]))
    assert tokenizer.eos_id == own
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    tokenizer.save(tmp_path / "run" / "tokenizer")
    assert find_tokenizer(tmp_path / "run").eos_ids == tokenizer.eos_ids


def test_where_there_is_a_generation_config_the_ends_of_config_json_do_not_count(tmp_path: Path) -> None:
    files = {"generation_config": {"eos_token_id": [1]}, "config": {"eos_token_id": [0, 1]}}
    folder = write_bytes_level(tmp_path, ["<s>", "</s>"], tokenizer_config={"eos_token": "</s>"}, **files)
    assert load_tokenizer(folder).eos_ids == (1,)


@pytest.mark.parametrize("ends", [["</s>"], True, 1.5])
def test_ends_that_are_no_tokens_are_refused(tmp_path: Path, ends: Any) -> None:
    config = {"tokenizer_config": {"eos_token": "</s>"}, "generation_config": {"eos_token_id": ends}}
    with pytest.raises(DataError, match=r"(?s)generation_config.json.*eos_token_id"):
        load_tokenizer(write_bytes_level(tmp_path, ["<s>", "</s>"], **config))


def test_a_begin_and_a_padding_of_the_model_are_none_of_the_tokenizer(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "</s>", "pad_token": None}
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    folder = write_bytes_level(
        tmp_path, ["<s>", "</s>"], tokenizer_config=config, generation_config=generation, chat_template=INST
    )
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (None, tokenizer.eos_id)
    assert template_of(tokenizer).tokens(TALK) == ids(theirs, TALK)


@pytest.mark.parametrize("declared", [{"tokenizer_class": "GPT2Tokenizer"}, {}], ids=["by its class", "by its model"])
def test_a_class_has_tokens_that_its_files_need_not_name(tmp_path: Path, declared: dict[str, str]) -> None:
    files = {"tokenizer_config": {"model_max_length": 1024, **declared}, "config": {"model_type": "gpt2"}}
    folder = write_bytes_level(tmp_path / "folder", ["<|endoftext|>"], **files)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (0, 0)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").bos_id == AutoTokenizer.from_pretrained(tmp_path / "saved").bos_token_id


@pytest.mark.parametrize("legacy", [None, False, True])
@pytest.mark.parametrize(
    "source", [CHAT, INST, "<|im_start|>{{ messages[0].content }}<extra> and <extra>{{ messages[1].content }}"]
)
def test_a_sentencepiece_model_writes_the_chat_of_its_folder(
    tmp_path: Path, model: bytes, source: str, legacy: bool | None
) -> None:
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            "300": added("<|im_start|>"),
            "301": added("<|im_end|>"),
            "302": added("<extra>", special=False),
        },
        **({} if legacy is None else {"legacy": legacy}),
    }
    folder = write(tmp_path, tokenizer=model, tokenizer_config=config | {"chat_template": source})
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    tokens = template_of(tokenizer).tokens(TALK)
    assert tokens == ids(theirs, TALK)
    assert tokenizer.eos_ids == (theirs.eos_token_id,) == (301,)
    assert tokenizer.vocab_size == 303
    assert tokenizer.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    text = "Beautiful<extra> is<extra><|im_end|>"
    assert (
        tokenizer.encode(text)
        == theirs(text, add_special_tokens=False, split_special_tokens=False)["input_ids"][:-1]
        + tokenizer.encode(f"<extra>{text[-10:]}")[1:]
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_no_space_is_put_before_a_text_where_the_folder_says_so(tmp_path: Path, model: bytes, legacy: bool) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": legacy}
    folder = write(tmp_path / "folder", tokenizer=model, tokenizer_config=config)
    plain = load_tokenizer(folder)
    write(folder, tokenizer_config=config | {"add_prefix_space": False, "chat_template": INST})
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("Beautiful is", " better"):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"] != plain.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert template_of(tokenizer).tokens(TALK) == ids(theirs, TALK)
    assert tokenizer.fingerprint != plain.fingerprint


def test_the_older_files_of_added_tokens_are_read(tmp_path: Path, model: bytes) -> None:
    files = {"added_tokens": {"<|im_start|>": 300, "<|im_end|>": 301, "<extra>": 302}}
    files |= {"special_tokens_map": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}}
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    folder = write(tmp_path, tokenizer=model, tokenizer_config=config, **files)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_id == theirs.eos_token_id == 301
    assert template_of(tokenizer).tokens(TALK) == ids(theirs, TALK)
    assert tokenizer.decode([300, *tokenizer.encode("is"), 302]) == "is<extra>"


@pytest.mark.parametrize("key", ["added_tokens_decoder", "eos_token"])
def test_a_token_of_tokenizer_json_becomes_special_by_the_file_beside_it(tmp_path: Path, key: str) -> None:
    pieces = byte_level(["<s>", "</s>"])
    content = json.loads(pieces.to_str())
    vocabulary = content["model"]["vocab"]
    start, end, new = range(len(vocabulary), len(vocabulary) + 3)
    vocabulary |= {"<|im_start|>": start, "<|im_end|>": end}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]}
    if key == "added_tokens_decoder":
        entries = {start: added("<|im_start|>"), end: added("<|im_end|>"), new: added("<new>", special=False)}
        config = {"eos_token": "</s>", "added_tokens_decoder": entries}
    write(tmp_path, tokenizer_config=config | {"tokenizer_class": "PreTrainedTokenizerFast"}, chat_template=CHAT)
    tokenizer, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    tokens = template_of(tokenizer).tokens(TALK)
    assert tokens == ids(theirs, TALK) and {start, end} < set(tokens)
    assert tokenizer.eos_id == theirs.eos_token_id
    assert tokenizer.encode("a<new>b") == theirs("a<new>b", add_special_tokens=False)["input_ids"]


def test_an_added_token_that_would_get_another_number_is_refused(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "added_tokens_decoder": {"999": added("<new>")}}
    with pytest.raises(DataError, match=r"(?s)added_tokens_decoder 999.*<new>"):
        load_tokenizer(write_bytes_level(tmp_path, ["<s>", "</s>"], tokenizer_config=config))


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("form", ["files", "list", "file beside a key"])
def test_conversations_with_tools_have_the_template_for_tools(
    tmp_path: Path, model: bytes, kind: str, form: str
) -> None:
    texts = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools[0].name }} {{ eos_token }}"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if kind == "tokenizer.json":
        write_bytes_level(tmp_path, ["<s>", "</s>"])
    else:
        write(tmp_path, tokenizer=model)
        config["tokenizer_class"] = "LlamaTokenizer"
    if form == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    else:
        write(tmp_path / "additional_chat_templates", tool_use=texts["tool_use"])
        write(tmp_path, chat_template=texts["default"])
        config |= {"chat_template": "not this one"} if form == "file beside a key" else {}
    write(tmp_path, tokenizer_config=config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "saved").mkdir()
    load_tokenizer(tmp_path).save(tmp_path / "saved")
    for folder in (tmp_path, tmp_path / "saved"):
        template = template_of(load_tokenizer(folder))
        tool = {"name": "is", "description": "better", "parameters": {"type": "object", "properties": {}}}
        assert template.tokens(TALK, tools=[tool]) == ids(theirs, TALK, tools=[tool])
        assert template.tokens(TALK) == ids(theirs, TALK)


@pytest.mark.parametrize(
    "names",
    [
        {"image_token": "<image>"},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"model_specific_special_tokens": {"image_token": "<image>"}},
    ],
    ids=str,
)
def test_templates_know_tokens_of_further_names(tmp_path: Path, names: dict[str, Any]) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **names}
    source = "{{ image_token }}{{ messages[0].content }}"
    folder = write_bytes_level(tmp_path, ["<s>", "</s>", "<image>"], tokenizer_config=config, chat_template=source)
    tokens = template_of(load_tokenizer(folder)).tokens(TALK)
    assert tokens == ids(AutoTokenizer.from_pretrained(folder), TALK)
    assert tokens[0] == 2


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom", "glm", "t5"])
@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model", "bytes"])
def test_transformers_reads_a_saved_vocabulary_whatever_the_model(
    tmp_path: Path, model: bytes, kind: str, model_type: str
) -> None:
    if kind == "tokenizer.json":
        write_bytes_level(tmp_path, ["<s>", "</s>"], tokenizer_config={"eos_token": "</s>"})
    elif kind == "tokenizer.model":
        write(tmp_path, tokenizer=without_prefix(model))
    else:
        write(tmp_path, kitforge_tokenizer={"kind": "byte"})
    tokenizer, saved = load_tokenizer(tmp_path), tmp_path / "saved"
    write(saved, config={"model_type": model_type, "vocab_size": 300})
    tokenizer.save(saved)
    theirs = AutoTokenizer.from_pretrained(saved)
    for text in ("a\nb", "\u00e9\U0001f336", " two  spaces", "Beautiful is", "don't 123", " "):
        assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.pad_token_id in (tokenizer.pad_id, None)
    assert theirs.bos_token_id == tokenizer.bos_id
    assert type(load_tokenizer(saved)) is type(tokenizer)


def without_prefix(model: bytes) -> bytes:
    """The model as one that is trained here, which puts no space before a text."""
    return model + b"\x1a\x02\x18\x00"


def test_chatglm_begins_every_text_with_tokens_behind_its_pieces(tmp_path: Path, model: bytes) -> None:
    config = {"tokenizer_class": "ChatGLMTokenizer", "do_lower_case": False, "remove_space": False}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer=model, tokenizer_config=config))
    # [MASK] [gMASK] [sMASK] sop eop, then the roles of ChatGLM3.
    assert tokenizer.encode_prompt("is") == [301, 303, *tokenizer.encode("is")]
    assert tokenizer.vocab_size == 309
    assert tokenizer.decode([301, 303, *tokenizer.encode("is"), 306]) == "is"
    config |= {"chat_template": "[gMASK]sop<|user|>\n {{ messages[0].content }}<|assistant|>"}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer=model, tokenizer_config=config))
    tokens = template_of(tokenizer).tokens(TALK[:1])
    assert tokens[:3] == [301, 303, 306] and tokens[-1] == 307


@pytest.mark.parametrize(
    ("declared", "has_code", "is_read"),
    [
        ("GPTPanguTokenizer", False, False),
        ("OwnTokenizer", True, False),
        ("BaichuanTokenizer", True, True),
        ("", True, False),
    ],
)
def test_a_class_with_code_of_its_own_is_refused_by_its_name(
    tmp_path: Path, model: bytes, declared: str, has_code: bool, is_read: bool
) -> None:
    code = {"auto_map": {"AutoTokenizer": ["tokenization.OwnTokenizer", None]}} if has_code else {}
    folder = write(tmp_path, tokenizer=model, tokenizer_config={"tokenizer_class": declared, **code})
    if is_read:
        assert load_tokenizer(folder).encode("is")
        return
    with pytest.raises(DataError, match=declared or "its tokenizer"):
        load_tokenizer(folder)


def test_kinds_of_folders_are_told_apart(tmp_path: Path, model: bytes) -> None:
    assert isinstance(load_tokenizer(write(tmp_path / "a", tokenizer=model)), SentencePieceTokenizer)
    folder = write_bytes_level(tmp_path / "b", ["</s>"], tokenizer_config={"eos_token": "</s>"})
    assert isinstance(load_tokenizer(folder), HuggingFaceTokenizer)
