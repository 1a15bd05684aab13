"""The tokenizer interface, and helpers of tokenizers from other libraries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.foundation.untrusted import parse_json

# The text of an unknown token id, as Unicode's replacement character is for invalid bytes.
_UNREADABLE = "\ufffd"
# A probe text for the tokens that a tokenizer adds around every text.
_PROBE = "a"
NO_TOKEN = _UNREADABLE.encode()

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTokenSpan:
    """A token beside the tokenizer's own vocabulary that is spelt in [start, stop) of a text."""

    token: int
    start: int
    stop: int
    is_special: bool


class Tokenizer(Protocol):
    """Text to numbers below `vocab_size` and back. Can be sent to another process."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the vocabulary has one."""

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""

    @property
    def pad_id(self) -> int:
        """What fills a row; `eos_id` in a vocabulary without a token of its own for it."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a generated text."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The values of the generation_config.json beside it, or of config.json that belong there."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens of the text alone: nothing is put before or after it, and no text becomes a special token."""

    def encode_array(self, text: str) -> Tokens:
        """`encode` as an array of [length]."""

    def encode_prompt(self, text: str, other: str | None = None) -> list[int]:
        """`encode` between the special tokens that this vocabulary begins and ends every text with, such as BOS: what
        `transformers` gives with `add_special_tokens=True`, also for a pair of texts. Where it has no such rule, what
        `encode` gives."""

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode_prompt`, and the characters [start, stop) of each token: of a part of a character that character, of
        a special token none."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens without the special ones; invalid bytes and ids become U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 that the token stands for in a text, which may be parts of characters: none of a special
        token, U+FFFD of a number that is not a token."""

    def save(self, folder: Path) -> None:
        """Write files that `load_tokenizer` reads."""


def document_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens before and after those of a document: the tokenizer's own, and one end token."""
    text, prompt = tokenizer.encode(_PROBE), tokenizer.encode_prompt(_PROBE)
    starts = range(len(prompt) - len(text) + 1)
    start = next((each for each in starts if prompt[each : each + len(text)] == text), None)
    if start is None:
        raise DataError(
            "the tokenizer writes a text otherwise between its special tokens than alone",
            got=f"{text} alone, {prompt} between them",
            expected="the same tokens, with others before or after them",
        )
    before, after = prompt[:start], prompt[start + len(text) :]
    has_end = bool(after) and after[-1] in tokenizer.eos_ids
    return before, after if has_end else [*after, tokenizer.eos_id]


def decode_known(ids: Sequence[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """A model's vocabulary may be padded beyond the tokenizer's; such numbers must neither vanish nor raise."""
    plain = [int(token) for token in ids]
    if all(0 <= token < vocab_size for token in plain):
        return decode(plain)
    text, context = "", list[int]()
    for is_known, run in groupby(plain, key=lambda token: 0 <= token < vocab_size):
        tokens = list(run)
        if not is_known:
            text += _UNREADABLE * len(tokens)
            continue
        # What follows such a number does not begin the text.
        text += decode([*context, *tokens])[len(decode(context)) :]
        said = decode(tokens)
        context = tokens if said and not said.endswith(_UNREADABLE) else context
    return text


def without_end(owner: str) -> DataError:
    """The error for a vocabulary without an end token."""
    return DataError(
        f"{owner} has no token that ends a document",
        got="no eos token",
        expected="eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or config.json",
    )


def read_tokenizer_file(path: Path) -> bytes:
    """The bytes of one of a tokenizer's files."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}", got=error.strerror) from None


def parse_object(name: str | Path, content: bytes) -> dict[str, Any]:
    """The JSON object that a file holds; `name` is the file's, for the message."""
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"{name} is not JSON", got=error) from None
    if not isinstance(value, dict):
        raise DataError(f"{name} is not what it should be", got=type(value).__name__, expected="a JSON object")
    return value
