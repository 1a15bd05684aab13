"""The bytes of tokens in a row are the text, whatever a vocabulary writes for spaces, bytes and beginnings of words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.data.source import open_source
from kitforge.data.tokenizers.loading import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerConfig,
    make_tokenizer,
)

decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
LINES = ["the cat sat on the mat", "für drei Katzen", "a  b\tc\n", "夜の月 🌙"]
SPECIAL = ["<unk>", "<s>", "</s>"]
ALL_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> object:
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    found.train_from_iterator(LINES, trainer)
    found.add_tokens(["new word", "Ġadded"])
    return found


def byte_fallback() -> object:
    """As Llama 2 and Gemma have it."""
    letters = sorted({letter for line in LINES[:2] for letter in line.replace(" ", "▁")})
    vocabulary = {piece: place for place, piece in enumerate([*SPECIAL, *ALL_BYTES, *letters, "▁t", "▁th"])}
    merges = [("▁", "t"), ("▁t", "h")]
    found = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(parts)
    return found


def metaspace() -> object:
    """As T5 has it."""
    letters = sorted({letter for line in LINES for letter in line.replace(" ", "▁")})
    found = tokenizers.Tokenizer(models.Unigram([*((each, 0.0) for each in SPECIAL), *((x, -1.0) for x in letters)], 0))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return found


def words() -> object:
    """As BERT has it."""
    pieces = [*SPECIAL, "the", "cat", "##s", "mat", "on", "##o"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    found = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.decoder = decoders.WordPiece(cleanup=False)
    return found


MADE: dict[str, Callable[[], object]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "words": words,
}


def loaded(pieces: object, folder: Path) -> HuggingFaceTokenizer:
    pieces.add_special_tokens(SPECIAL)  # type: ignore[attr-defined]
    pieces.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return HuggingFaceTokenizer(folder)


@pytest.fixture(scope="module", params=["byte", "sentencepiece", *MADE])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "sentencepiece":
        return make_tokenizer(TokenizerConfig(name="sentencepiece", vocab_size=300), open_source(LINES * 50), folder)
    return loaded(MADE[request.param](), folder)


def joined(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_bytes_of_tokens_are_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Of texts, and of tokens in any order. Decoders that begin words with a space leave out the first one."""
    text = data.draw(st.sampled_from(LINES) | st.text("theca ts\t語é🌙", max_size=12))
    size = tokenizer.vocab_size
    for tokens in (tokenizer.encode(text), data.draw(st.lists(st.integers(0, size - 1), max_size=8))):
        # The end of a word has nothing before it here.
        decoded = tokenizer.decode(tokens).removeprefix("##")
        # Each decoder has its own mind on how many marks bytes that are no text are worth.
        if "\ufffd" not in decoded:
            assert joined(tokenizer, tokens) in (decoded, f" {decoded}")


def test_special_tokens_have_no_bytes_and_numbers_beyond_are_marked(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.eos_id) == b""
    for beyond in (tokenizer.vocab_size, tokenizer.vocab_size + 7, -1):
        assert tokenizer.token_bytes(beyond) == "\ufffd".encode()


def test_parts_of_a_character_are_the_bytes_that_they_are(tmp_path: Path) -> None:
    for pieces in (byte_level(), byte_fallback()):
        tokenizer = loaded(pieces, tmp_path)
        parts = [tokenizer.token_bytes(token) for token in tokenizer.encode("x€")[-3:]]
        assert parts == [bytes([byte]) for byte in "€".encode()]
    assert [ByteTokenizer().token_bytes(byte) for byte in "é".encode()] == [b"\xc3", b"\xa9"]
