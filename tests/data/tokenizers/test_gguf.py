"""Tokenizers in GGUF files: written and read back they give the same tokens; what the format cannot hold is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kitforge.data.source import open_source
from kitforge.data.tokenizers import gguf as gguf_tokenizer
from kitforge.data.tokenizers.gguf import tokenizer_files, tokenizer_metadata
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.loading import ByteTokenizer, load_tokenizer
from kitforge.data.tokenizers.protocol import Tokenizer as AnyTokenizer
from kitforge.data.tokenizers.sentencepiece import SentencePieceTokenizer, trained
from kitforge.foundation.errors import DataError, ModelError
from kitforge.models.gguf import add_value
from tests.tokenizer_folders import BOTH, CORPUS, LLAMA, gemma_like

ENDS = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
TEXTS = [
    "It's 12345 apples,  isn't it?\n\n  yes",
    "naïve 日本語 😀\t\r\n",
    "",
    " ",
    "<s> is no token </s>",
    "Beautiful is",
]


def byte_level(name: str, *, ignores_merges: bool = False) -> Tokenizer:
    """A byte-level vocabulary whose text is split as that `tokenizer.ggml.pre` says."""
    pieces = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    splits = gguf_tokenizer._SPLITS[name]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if gguf_tokenizer._DIGITS in splits else []
    known = (gguf_tokenizer._DIGITS, gguf_tokenizer._GPT2)
    steps += [pre_tokenizers.Split(Regex(each), "isolated") for each in splits if each not in known]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gguf_tokenizer._GPT2 in splits))
    pieces.pre_tokenizer = pre_tokenizers.Sequence(steps)
    pieces.decoder = decoders.ByteLevel()
    if name == "qwen2":
        pieces.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    pieces.train_from_iterator([*CORPUS, "don't 12 345 it's\n\n" * 9], trainer)
    pieces.add_tokens(["<tool>"])
    return pieces


def folder_of(pieces: Tokenizer, folder: Path, **config: Any) -> HuggingFaceTokenizer:
    pieces.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(ENDS | config))
    return HuggingFaceTokenizer(folder)


def again(tokenizer: AnyTokenizer, vocab_size: int | None = None) -> HuggingFaceTokenizer:
    """The tokenizer after a way through a GGUF file's metadata."""
    return HuggingFaceTokenizer(tokenizer_files(tokenizer_metadata(tokenizer, vocab_size or tokenizer.vocab_size)))


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("frame", ["none", "begin", "both"])
def test_byte_level_vocabularies_come_back(name: str, frame: str, tmp_path: Path) -> None:
    pieces = byte_level(name, ignores_merges=name == "llama-bpe")
    if frame != "none":
        pieces.post_processor = LLAMA if frame == "begin" else BOTH
    tokenizer = folder_of(pieces, tmp_path)
    read = again(tokenizer)
    assert (read.bos_id, read.eos_ids, read.pad_id) == (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id)
    assert read.special_tokens == tokenizer.special_tokens
    assert read.chat_templates == tokenizer.chat_templates
    for text in TEXTS:
        assert read.encode(text) == tokenizer.encode(text)
        assert read.encode_prompt(text) == tokenizer.encode_prompt(text)
        assert read.decode(read.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        assert read.find_added(text + "<tool>") == tokenizer.find_added(text + "<tool>")


@given(st.text(max_size=40))
def test_any_text_has_the_same_tokens(text: str) -> None:
    tokenizer, read = PAIRS["smollm"]
    assert read.encode(text) == tokenizer.encode(text)


@given(st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=40))
def test_any_text_has_the_same_pieces_of_sentencepiece(text: str) -> None:
    tokenizer, read = PAIRS["sentencepiece"]
    assert read.encode(text) == tokenizer.encode(text)
    assert read.decode(read.encode(text)) == tokenizer.decode(tokenizer.encode(text))


@pytest.fixture(autouse=True, scope="module")
def _pairs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tokenizers")
    smollm = folder_of(byte_level("smollm"), folder)
    (folder / "corpus.txt").write_text("".join(CORPUS) + "numbers 12 345, naïve\n" * 9)
    pieces = trained(open_source(folder / "corpus.txt"), 320, folder)
    PAIRS["smollm"], PAIRS["sentencepiece"] = (smollm, again(smollm)), (pieces, again(pieces))


PAIRS: dict[str, tuple[AnyTokenizer, HuggingFaceTokenizer]] = {}


def test_a_byte_tokenizer_comes_back() -> None:
    tokenizer = ByteTokenizer()
    read = again(tokenizer)
    assert (read.vocab_size, read.eos_ids, read.pad_id) == (258, (256,), 257)
    for text in TEXTS:
        assert read.encode(text) == tokenizer.encode(text)


def test_a_vocabulary_of_words_with_byte_fallback_comes_back(tmp_path: Path) -> None:
    pieces = gemma_like(["<s>", "</s>", "<unk>"])
    pieces.pre_tokenizer = None
    tokenizer = folder_of(pieces, tmp_path)
    for text in ("Be a Bex", "xx Be", "\u00e9"):
        assert again(tokenizer).encode(text) == tokenizer.encode(text)


def test_a_model_with_more_rows_than_tokens_has_names_for_them(tmp_path: Path) -> None:
    tokenizer = folder_of(byte_level("gpt-2"), tmp_path)
    metadata = tokenizer_metadata(tokenizer, tokenizer.vocab_size + 5)
    assert len(metadata["tokenizer.ggml.tokens"]) == tokenizer.vocab_size + 5
    assert len(set(metadata["tokenizer.ggml.tokens"])) == tokenizer.vocab_size + 5
    assert metadata["tokenizer.ggml.token_type"][-5:] == [5] * 5


def test_a_rule_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    pieces = byte_level("gpt-2")
    pieces.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)])
    with pytest.raises(DataError, match=r"(?s)Punctuation.*llama-bpe"):
        again(folder_of(pieces, tmp_path))


def test_a_normalizer_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    pieces = byte_level("gpt-2")
    pieces.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match="other tokens"):
        again(folder_of(pieces, tmp_path))


def test_another_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    pieces = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>"))
    with pytest.raises(DataError, match="WordLevel"):
        again(folder_of(pieces, tmp_path))


def metadata(**changes: Any) -> dict[str, Any]:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "</s>"], "token_type": [1, 1, 3], "merges": []}
    return {f"tokenizer.ggml.{name}": value for name, value in (values | {"eos_token_id": 2} | changes).items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "unknown kind"),
        ({"pre": "lama-bpe"}, r"(?s)lama-bpe.*llama-bpe"),
        ({"tokens": None}, "tokens"),
        ({"tokens": ["a", "a", "</s>"]}, "twice"),
        ({"token_type": [1]}, "token_type"),
        ({"eos_token_id": 3}, "impossible eos"),
        ({"merges": ["ab"]}, "not a pair"),
        ({"merges": [1]}, "merges"),
    ],
)
def test_entries_that_do_not_belong_together_are_refused(changes: dict[str, Any], message: str) -> None:
    assert HuggingFaceTokenizer(tokenizer_files(metadata())).encode("ab") == [0, 1]
    with pytest.raises(ModelError, match=message):
        tokenizer_files(metadata(**changes))


def test_the_tokenizer_of_a_file_is_found_beside_its_weights(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(_written(tmp_path / "a.gguf")), HuggingFaceTokenizer)


def _written(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata(tokens=["a", "b", "ab"], merges=["a b"]).items():
        add_value(writer, name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def test_sentencepiece_is_written_with_its_scores() -> None:
    tokenizer, _ = PAIRS["sentencepiece"]
    assert isinstance(tokenizer, SentencePieceTokenizer)
    values = tokenizer_metadata(tokenizer, tokenizer.vocab_size)
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.add_space_prefix"] is False
    assert len(values["tokenizer.ggml.scores"]) == tokenizer.vocab_size
