"""Masked tokens (Devlin et al., 2019), as a pure function of a key and the tokens of a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.seed import key
from kitforge.foundation.types import IGNORED

Row: TypeAlias = NDArray[np.int64]
# A vocabulary without a token for masks gets one behind its last.
MASK_TEXT = "[MASK]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskToken:
    """The token in the place of a masked one, and its spelling in a text."""

    number: int
    text: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MaskToken":
        """The tokenizer's own, else the first number behind its vocabulary."""
        own, names = getattr(tokenizer, "mask_id", None), getattr(tokenizer, "named_tokens", {})
        if own is None:
            return cls(number=tokenizer.vocab_size, text=MASK_TEXT)
        return cls(number=own, text=names["mask_token"])


def frame_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that every text begins and ends with."""
    whole, own = tokenizer.encode_prompt("a"), tokenizer.encode("a")
    starts = (at for at in range(len(whole) - len(own) + 1) if whole[at : at + len(own)] == own)
    first = next(starts, 0)
    return whole[:first], whole[first + len(own) :]


def framed_rows(tokenizer: Tokenizer, text: str, limit: int) -> list[tuple[list[int], list[int]]]:
    """The tokens of a text in rows of at most `limit`, each between the special tokens of a whole text, and the word
    of every token: 0 for a special one, else a number that is new where, as in transformers, a token does not begin
    where the one before it ended."""
    tokens, spans = tokenizer.encode_offsets(text)
    head, tail = frame_of(tokenizer)
    kept = slice(len(head), len(tokens) - len(tail))
    own, words, ended = tokens[kept], list[int](), -1
    for start, stop in spans[kept]:
        words.append((words[-1] if words else 0) + (start != ended or not words))
        ended = stop
    room = max(limit - len(head) - len(tail), 1)
    return [
        (head + own[at : at + room] + tail, [0] * len(head) + words[at : at + room] + [0] * len(tail))
        for at in range(0, len(own), room)
    ]


def masked(
    tokens: Row, words: Row, seed: Sequence[str | int], fraction: float, mask: int, vocab: int
) -> tuple[Row, Row]:
    """Tokens of a row with that fraction of its words chosen, word by word, and the targets: the chosen tokens, IGNORED
    elsewhere. Of the chosen tokens eight of ten become the mask, one any of `vocab` tokens, and one stays."""

    def chances(what: str, numbers: Row) -> NDArray[np.float64]:
        return hash_array(numbers.astype(np.uint64), key(*seed, what)) / 2.0**64

    is_chosen = (words > 0) & (chances("word", words) < fraction)
    positions = np.arange(len(tokens))
    kind, other = chances("kind", positions), (chances("other", positions) * vocab).astype(np.int64)
    changed = np.where(kind < 0.8, mask, np.where(kind < 0.9, other, tokens))
    return np.where(is_chosen, changed, tokens), np.where(is_chosen, tokens, IGNORED)
