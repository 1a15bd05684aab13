"""What the next tokens of a sequence may be, as packed bits. Knows neither text nor grammars; `grammar` makes those.

Bit t % 32 of word t // 32 of a mask is 1 where token t is allowed. Words of a mask: ceil(vocab / 32).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.inference.sampling import SamplingOptions

Masks = NDArray[np.int32]


class Constraint(Protocol):
    """The tokens that a sequence may go on with, which change with each of its tokens."""

    @property
    def reads_tokens(self) -> bool:
        """Whether masks depend on which tokens came, and not only on how many."""

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """Masks [1 + drafts, words] of the next token and of the one after each draft, or None where all tokens are
        allowed; after a draft that is not allowed itself, a row means nothing. Changes nothing. Raises a KitforgeError
        that ends the sequence as "failed"."""

    def drafts(self, guesses: list[int]) -> list[int]:
        """Tokens to verify in one pass: those that must follow, or else the guesses as far as they are allowed. What
        must follow may have several tokenizations, each with its probability, so it is sampled too."""

    def advance(self, token: int) -> None:
        """Take up a token that was sampled by a mask."""

    def copy(self) -> Constraint:
        """One in the same state, for another sequence."""


@dataclass(slots=True, kw_only=True)
class Bans(Constraint):
    """Tokens that are never generated, or not yet, and words of several tokens, within what another constraint
    allows."""

    lasting: NDArray[np.int32]  # [words]
    early: NDArray[np.int32]  # [words], of the next `num_early` tokens
    num_early: int
    words: tuple[tuple[int, ...], ...]  # the last token of each is excluded after the others
    tail: list[int]  # the last tokens, as many as the longest word has
    other: Constraint | None

    @property
    def reads_tokens(self) -> bool:
        return bool(self.words) or self.other is not None

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        rows = np.tile(self.lasting, (1 + len(drafts), 1))
        for word in self.words:
            for count, row in enumerate(rows.view(np.uint8)):
                if (*self.tail, *drafts[:count])[1 - len(word) :] == word[:-1]:
                    row[word[-1] // 8] &= 255 - (1 << word[-1] % 8)
        allowed = None if self.other is None else self.other.masks(drafts)
        rows = rows if allowed is None else rows & allowed
        # A grammar comes before the least number of tokens: a text that can only end does.
        early = rows[: self.num_early] & self.early
        rows[: self.num_early] = np.where(early.any(-1, keepdims=True), early, rows[: self.num_early])
        if not rows[0].any():
            got = "a grammar, of whose tokens inference.suppress_tokens or inference.bad_words exclude all"
            raise DataError(
                "no token is left to continue a text with", got=got, fix="change the grammar or the options"
            )
        return None if (rows == -1).all() else rows

    def drafts(self, guesses: list[int]) -> list[int]:
        """None within a grammar, which may have no token left after a draft that is excluded here."""
        return guesses if self.other is None else []

    def advance(self, token: int) -> None:
        self.num_early = max(0, self.num_early - 1)
        self.tail = [*self.tail, token][-max(map(len, self.words), default=1) :]
        if self.other is not None:
            self.other.advance(token)

    def copy(self) -> Bans:
        return replace(self, other=None if self.other is None else self.other.copy())


def constraint_of(
    options: SamplingOptions,
    stop_ids: Collection[int],
    prompt: Sequence[int],
    vocab_size: int,
    other: Constraint | None,
) -> Constraint | None:
    """`other` within the bans of the options, for the continuation of a prompt; None where all tokens are allowed. A
    publisher may name tokens that its network does not have."""
    words = tuple(word for word in options.bad_words if max(word) < vocab_size)
    if not (words or options.suppress_tokens or options.min_new_tokens):
        return other
    return Bans(
        lasting=_all_but(options.suppress_tokens or (), vocab_size),
        early=_all_but(stop_ids, vocab_size),
        num_early=options.min_new_tokens,
        words=words,
        tail=list(prompt[-max(map(len, words), default=1) :]),
        other=other,
    )


def _all_but(tokens: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    kept = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    kept[[token for token in tokens if token < vocab_size]] = 0
    return np.packbits(kept, bitorder="little").view(np.int32)
