"""Text to tokens and back without loss; the files tokenizers are kept in; what is said about those that cannot be."""

import json
import multiprocessing
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data import optional_imports
from kitforge.data.source import open_source
from kitforge.data.tokenizers.loading import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerConfig,
    load_tokenizer,
    make_tokenizer,
)
from kitforge.foundation.errors import ConfigError, DataError, DependencyError

LINES = ["def add(first, second):\n    return first + second\n", "class Stack:\n\tpass\n\n\n", "  für 三 😀  x\r\n"]
HARD = [
    "",
    " ",
    "  a",
    "a  ",
    "\n\n\t x",
    "\u2581",
    "a\u2581\u2581b \u2581",
    "\x00",
    "<s></s><unk>",
    "<0x41>",
    "\ufffd",
    "é e\u0301 ﬁ",
]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    config = TokenizerConfig(name="sentencepiece", vocab_size=320)
    return make_tokenizer(config, open_source(LINES * 50), tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def huggingface_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE vocabulary with special tokens, an added one, and every bad habit such files have."""
    folder = tmp_path_factory.mktemp("huggingface")
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>", "<|turn|>", "<|pad|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    pieces.train_from_iterator(LINES, trainer)
    pieces.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    pieces.enable_truncation(4)
    pieces.enable_padding(length=16)
    pieces.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|begin|>",
                "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
                "pad_token": "<|pad|>",
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return folder


@pytest.fixture(params=["byte", "sentencepiece", "huggingface"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return request.getfixturevalue("sentencepiece")
    return HuggingFaceTokenizer(request.getfixturevalue("huggingface_folder"))


@pytest.mark.parametrize("text", [*HARD, *LINES])
def test_text_comes_back_to_the_letter(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_a_trained_vocabulary(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_the_array_holds_the_same_tokens(tokenizer: Tokenizer) -> None:
    array = tokenizer.encode_array(LINES[0])
    assert array.tolist() == tokenizer.encode(LINES[0])
    assert array.dtype in (np.uint8, np.uint16, np.uint32)


def test_tokens_lie_below_the_size_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert max(tokenizer.encode("".join(LINES))) < tokenizer.vocab_size
    assert max(tokenizer.eos_id, tokenizer.pad_id) < tokenizer.vocab_size
    assert tokenizer.eos_id in tokenizer.eos_ids


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    special = [tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode([*special, *tokenizer.encode("a b"), *special]) == "a b"


def test_no_text_becomes_a_special_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s></s><pad><|begin|><|end|><|pad|>")
    assert not {tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids} & set(ids)


def test_what_is_no_token_is_marked(tokenizer: Tokenizer) -> None:
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 7]
    assert tokenizer.decode([*tokenizer.encode("a"), *beyond, *tokenizer.encode("b")]) == "a\ufffd\ufffdb"


def test_half_a_letter_is_marked(tokenizer: Tokenizer) -> None:
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("語")[:1])


def test_a_saved_tokenizer_is_the_same_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(LINES[0]) == tokenizer.encode(LINES[0])
    assert (loaded.eos_ids, loaded.pad_id, loaded.bos_id) == (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id)


def test_a_tokenizer_reaches_another_process(tokenizer: Tokenizer) -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.send_bytes(ForkingPickler.dumps(tokenizer))
    assert reader.recv().encode(LINES[2]) == tokenizer.encode(LINES[2])


def test_bytes_are_their_own_tokens() -> None:
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]


def test_a_vocabulary_is_trained_once_and_always_the_same(tmp_path: Path, sentencepiece: Tokenizer) -> None:
    config, source = TokenizerConfig(name="sentencepiece", vocab_size=320), open_source(LINES * 50)
    assert make_tokenizer(config, source, tmp_path).fingerprint == sentencepiece.fingerprint
    (kept,) = tmp_path.iterdir()
    before = kept.stat().st_mtime_ns
    make_tokenizer(config, source, tmp_path)
    assert kept.stat().st_mtime_ns == before


def test_another_corpus_or_size_gives_another_vocabulary(tmp_path: Path) -> None:
    for size, corpus in ((310, LINES), (320, LINES), (320, LINES[:2])):
        make_tokenizer(TokenizerConfig(name="sentencepiece", vocab_size=size), open_source(corpus * 50), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_trained_vocabulary_has_the_size_that_was_asked_for(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.vocab_size == 320


def test_a_long_line_is_learned_from(tmp_path: Path) -> None:
    line = "alpha beta gamma " * 1000
    config = TokenizerConfig(name="sentencepiece", vocab_size=280)
    assert len(make_tokenizer(config, open_source([line]), tmp_path).encode(line)) < len(line) / 2


def test_a_sample_of_a_large_corpus_is_spread_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kitforge.data.tokenizers import sentencepiece

    monkeypatch.setattr(sentencepiece, "_TRAINING_CHARACTERS", 100)
    lines = [f"line {number:04}\n" for number in range(100)]
    found = list(sentencepiece._sample(open_source(["".join(lines[:50]), "".join(lines[50:])])))
    assert found == lines[9::10]


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_vocabulary_that_cannot_be_made_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)no sentencepiece vocabulary.*vocab_size={size}: Vocabulary size"):
        make_tokenizer(TokenizerConfig(name="sentencepiece", vocab_size=size), open_source(LINES), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_corpus_reaches_through_the_training(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{broken\n')
    config = TokenizerConfig(name="sentencepiece", vocab_size=300)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        make_tokenizer(config, open_source(tmp_path / "a.jsonl"), tmp_path / "cache")


def test_training_needs_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only be trained on a corpus"):
        make_tokenizer(TokenizerConfig(name="sentencepiece"), None, tmp_path)


def test_a_model_file_can_be_named(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    sentencepiece.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        config = TokenizerConfig(name=str(path))
        assert make_tokenizer(config, None, tmp_path).fingerprint == sentencepiece.fingerprint


def test_a_folder_can_be_the_name(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    assert isinstance(make_tokenizer(TokenizerConfig(name=str(tmp_path)), None, tmp_path), ByteTokenizer)


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'sentencepiece'"):
        make_tokenizer(TokenizerConfig(name="sentencepeace"), None, tmp_path)


def test_a_folder_without_a_tokenizer_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(DataError, match=r"(?s)no tokenizer in.*vocab\.txt.*tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("kitforge_tokenizer.json", '{"kind": "word"}', "unknown tokenizer"),
        ("kitforge_tokenizer.json", "{", "is not JSON"),
        ("kitforge_tokenizer.json", "[]", "is not what it should be"),
        ("tokenizer.model", "not a model", "no sentencepiece model"),
        ("tokenizer.json", "not a tokenizer", "cannot be read"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*absent\.model"):
        SentencePieceTokenizer(tmp_path / "absent.model")


def test_every_end_token_of_a_folder_is_found(huggingface_folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(huggingface_folder)
    assert (tokenizer.eos_id, tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == (1, (1, 2), 0, 3)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(optional_imports.importlib, "import_module", absent)
    with pytest.raises(DependencyError, match=r"(?s)'sentencepiece'.*kitforge\[transformers\]"):
        SentencePieceTokenizer(b"")
