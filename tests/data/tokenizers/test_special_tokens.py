"""What begins and ends a text is the tokenizer's word: token for token what `transformers` makes of the same folder."""

import io
import json
import multiprocessing
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from kitforge.data.source import open_source
from kitforge.data.text.token_cache import build_token_cache
from kitforge.data.tokenizers.loading import ByteTokenizer, TokenizerConfig, load_tokenizer, make_tokenizer
from kitforge.data.tokenizers.protocol import document_frame
from kitforge.foundation.errors import DataError
from tests.tokenizer_folders import CORPUS, ENDS, FLAGS, KINDS, byte_level, template, write_kind

TEXTS = ["Beautiful is better", " two  spaces\n\nand lines\n", "für 三 😀", "x"]


@pytest.fixture(scope="module")
def model() -> bytes:
    """A sentencepiece model as LLaMA has it: a space before every text, bytes for unknown letters."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[0].splitlines()),
        model_writer=file,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return file.getvalue()


@pytest.mark.parametrize("name", KINDS)
def test_a_text_begins_and_ends_as_in_transformers(tmp_path: Path, name: str) -> None:
    folder = write_kind(name, tmp_path / "folder")
    before, after = KINDS[name][4:]
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        assert ours.encode_prompt(text) == theirs(text)["input_ids"] == [*before, *ours.encode(text), *after]
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode_prompt("x") == ours.encode_prompt("x")


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_eos_token": True}, FLAGS, {"add_bos_token": False}], ids=str
)
def test_a_sentencepiece_model_goes_by_the_flags_beside_it(
    tmp_path: Path, model: bytes, flags: dict[str, bool]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ENDS | flags | {"tokenizer_class": "LlamaTokenizer"}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    before = [1] if flags.get("add_bos_token") else []
    after = [2] if flags.get("add_eos_token") else []
    for text in ("Beautiful is better", "x", "für 三"):
        assert ours.encode_prompt(text) == theirs(text)["input_ids"] == [*before, *ours.encode(text), *after]
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.send_bytes(ForkingPickler.dumps(ours))
    for again in (load_tokenizer(tmp_path / "saved"), reader.recv()):
        assert again.encode_prompt("x") == ours.encode_prompt("x")
        assert again.fingerprint == ours.fingerprint


def test_a_flag_for_a_token_that_is_not_there_is_refused(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<begin>", "add_bos_token": true}')
    with pytest.raises(DataError, match=r"(?s)add_bos_token.*<begin>"):
        load_tokenizer(tmp_path)


def test_tokenizers_of_ours_add_nothing(tmp_path: Path) -> None:
    assert ByteTokenizer().encode_prompt("aé") == [97, 0xC3, 0xA9]
    trained = make_tokenizer(TokenizerConfig(name="sentencepiece", vocab_size=290), open_source(CORPUS), tmp_path)
    assert trained.encode_prompt("Beautiful") == trained.encode("Beautiful")


def test_a_rule_changes_the_fingerprint_and_nothing_else_does(tmp_path: Path, model: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model)
    plain = load_tokenizer(tmp_path).fingerprint
    found = {}
    for name, flags in (("none", {"add_bos_token": False}), ("begin", {"add_bos_token": True}), ("both", FLAGS)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(ENDS | flags))
        found[name] = load_tokenizer(tmp_path).fingerprint
    assert found["none"] == plain
    assert len(set(found.values())) == 3


@pytest.mark.parametrize(("name", "num_workers"), [(name, 1) for name in (*KINDS, "bytes")] + [("glm", 2)])
def test_every_document_begins_as_the_tokenizer_says_and_ends_once(tmp_path: Path, name: str, num_workers: int) -> None:
    tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(write_kind(name, tmp_path / "folder"))
    before = [] if name == "bytes" else KINDS[name][4]
    texts = ["one text\nsecond", "another\nline", "a text that ends in </s>"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    source = open_source([tmp_path / f"{number}.txt" for number in range(3)])
    cache = build_token_cache(source, tokenizer, tmp_path / "cache", num_workers=num_workers)
    for number, text in enumerate(texts):
        tokens = cache.tokens[cache.offsets[number] : cache.offsets[number + 1]].tolist()
        assert tokens == [*before, *tokenizer.encode(text), tokenizer.eos_id]


def test_a_begin_token_that_is_also_the_end_token_is_no_end(tmp_path: Path) -> None:
    pieces = byte_level(["<|endoftext|>"])
    pieces.post_processor = template("<|endoftext|> $A", ("<|endoftext|>", 0))
    pieces.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}')
    assert document_frame(load_tokenizer(tmp_path)) == ([0], [0])
