"""Loading of tokenizers from options or a folder, and the byte tokenizer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kitforge.data.gguf_file import GGUF_SUFFIX, GgufFile, is_gguf
from kitforge.data.source import Source
from kitforge.data.tokenizers.folder import TokenizerFolder
from kitforge.data.tokenizers.generation_config import GENERATION_CONFIG
from kitforge.data.tokenizers.gguf import byte_level_files, tokenizer_files
from kitforge.data.tokenizers.huggingface import HUGGINGFACE_FILE, HuggingFaceTokenizer
from kitforge.data.tokenizers.protocol import (
    NO_TOKEN,
    Tokenizer,
    Tokens,
    decode_known,
    parse_object,
    read_tokenizer_file,
)
from kitforge.data.tokenizers.sentencepiece import SENTENCEPIECE_FILE, SentencePieceTokenizer, trained
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, DataError, nearest
from kitforge.foundation.files import write_text

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TOKENIZER_FOLDER",
    "Tokenizer",
    "TokenizerConfig",
    "find_tokenizer",
    "load_tokenizer",
    "make_tokenizer",
]

_MARKER = "kitforge_tokenizer.json"
# Where a run keeps its tokenizer.
TOKENIZER_FOLDER = "tokenizer"


class ByteTokenizer:
    """The bytes of UTF-8: 256 tokens, one more that ends a document and one that fills rows. Needs no files; a folder
    may say of its model how texts are generated, and which other tokens end one."""

    vocab_size = 258
    bos_id: int | None = None
    eos_id = 256
    pad_id = 257
    eos_ids: tuple[int, ...] = (256,)
    fingerprint = "byte"

    def __init__(self, folder: TokenizerFolder | None = None) -> None:
        self._generation = {} if folder is None else folder.generation
        self._written = None if folder is None else folder.files.get(GENERATION_CONFIG)
        if folder is not None:
            self.eos_ids = folder.end_ids(self.eos_id)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The values of generation_config.json."""
        return self._generation

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode("utf-8"))

    def encode_array(self, text: str) -> Tokens:
        """The bytes of the text, [bytes] of uint16."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def encode_prompt(self, text: str, other: str | None = None) -> list[int]:
        """The bytes of the text or the pair: nothing begins or ends it."""
        return self.encode(text + (other or ""))

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The bytes of the text, and the character of each."""
        spans = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode("utf-8")]
        return self.encode(text), spans

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; an incomplete or impossible sequence becomes U+FFFD."""
        return decode_known(ids, self.vocab_size, self._decode)

    def token_bytes(self, token: int) -> bytes:
        """The byte itself."""
        if 0 <= token < self.eos_id:
            return bytes([token])
        return b"" if 0 <= token < self.vocab_size else NO_TOKEN

    def save(self, folder: Path) -> None:
        """Write the marker file, and the files by which `transformers` reads the same tokens."""
        write_text(folder / _MARKER, json.dumps({"kind": "byte"}))
        for name, content in byte_level_files(self).items():
            write_text(folder / name, json.dumps(content, ensure_ascii=False))
        if self._written is not None:
            write_text(folder / GENERATION_CONFIG, self._written.decode())

    def _decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < self.eos_id).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer."""

    # "byte", "sentencepiece", a folder with a tokenizer, or the .model file of a sentencepiece one.
    name: str = "byte"
    # Of a sentencepiece vocabulary that is trained on the corpus.
    vocab_size: int = 4096

    def __post_init__(self) -> None:
        check(self.vocab_size >= 1, "tokenizer.vocab_size", self.vocab_size, "a positive number")


def make_tokenizer(config: TokenizerConfig, source: Source | None, cache_folder: Path) -> Tokenizer:
    """The tokenizer that the options ask for; one to be trained is trained on `source` once and then kept.

    Raises ConfigError for an unknown name, a vocabulary that cannot be made, or a missing corpus to train on.
    """
    if config.name == "byte":
        return ByteTokenizer()
    if config.name == "sentencepiece":
        if source is None:
            raise ConfigError(
                "a sentencepiece vocabulary can only be trained on a corpus",
                got="no training data",
                fix="tokenizer.name=FOLDER, or name a corpus: data.train=FILE",
            )
        return trained(source, config.vocab_size, cache_folder)
    path = Path(config.name)
    if path.is_dir() or is_gguf(path):
        return load_tokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise ConfigError(
        f"unknown tokenizer {config.name!r}",
        expected=f"byte, sentencepiece, or a folder, .model or {GGUF_SUFFIX} file with a tokenizer",
        fix=nearest(config.name, ["byte", "sentencepiece"]),
    )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, or that of a folder: our own marker, `tokenizer.json` or `tokenizer.model`, in this
    order. Of the two foreign files `tokenizer.json` comes first because it also holds tokens that were added later.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return HuggingFaceTokenizer(tokenizer_files(GgufFile(folder).metadata))
    if (folder / _MARKER).is_file():
        marker = parse_object(folder / _MARKER, read_tokenizer_file(folder / _MARKER))
        if marker.get("kind") != "byte":
            raise DataError(f"{folder / _MARKER} names an unknown tokenizer", got=marker.get("kind"), expected="byte")
        return ByteTokenizer(TokenizerFolder(folder))
    if (folder / HUGGINGFACE_FILE).is_file():
        return HuggingFaceTokenizer(folder)
    if (folder / SENTENCEPIECE_FILE).is_file():
        return SentencePieceTokenizer(folder / SENTENCEPIECE_FILE)
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise DataError(
        f"there is no tokenizer in {folder}",
        got=present or "an empty folder",
        expected=f"{_MARKER}, {HUGGINGFACE_FILE} or {SENTENCEPIECE_FILE}",
    )


def find_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run, a step, a Hugging Face folder or a GGUF file."""
    candidates = [folder / TOKENIZER_FOLDER, folder.parent.parent / TOKENIZER_FOLDER, folder]
    return load_tokenizer(next((path for path in candidates[:2] if path.is_dir()), folder))
