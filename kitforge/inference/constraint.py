"""What the next tokens of a sequence may be, as packed bits. Knows neither text nor grammars; `grammar` makes those.

Bit t % 32 of word t // 32 of a mask is 1 where token t is allowed. Words of a mask: ceil(vocab / 32).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.inference.sampling import SamplingOptions

Masks = NDArray[np.int32]


class Constraint(Protocol):
    """The allowed tokens of one sequence, which changes with each token of it."""

    @property
    def reads_tokens(self) -> bool:
        """Whether masks depend on which tokens came, and not only on how many."""
        ...

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """Masks [1 + drafts, words] of the next token and of the one after each draft, or None where every token is
        allowed. After a draft that is not allowed itself a row means nothing. Changes nothing. Raises a KitforgeError
        that ends the sequence as "failed"."""
        ...

    def drafts(self, guesses: list[int]) -> list[int]:
        """Tokens worth verifying in one pass: those that must follow, or else the guesses as far as they are allowed.
        They are drafts only: a text that must follow may have several tokenizations, each with its probability."""
        ...

    def advance(self, token: int) -> None:
        """Take up a token that was sampled by the mask."""
        ...

    def copy(self) -> Constraint:
        """One with the same state, for another sequence."""
        ...


@dataclass(slots=True, kw_only=True)
class TokenBans:
    """Tokens that are never generated, or not yet, and words of several tokens."""

    lasting: NDArray[np.int32]  # [words]
    early: NDArray[np.int32]  # [words], of the next `num_early` tokens
    num_early: int
    words: tuple[tuple[int, ...], ...]  # at least two tokens each; the last of them is excluded after the others
    tail: list[int]  # the last tokens, as many as the longest word has

    @property
    def reads_tokens(self) -> bool:
        """Only words need the tokens before."""
        return bool(self.words)

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """See `Constraint.masks`."""
        if not (self.num_early or self.words or (self.lasting != -1).any()):
            return None
        rows = np.tile(self.lasting, (1 + len(drafts), 1))
        rows[: self.num_early] = self.early
        for count in range(len(rows) if self.words else 0):
            text = [*self.tail, *drafts[:count]]
            for word in self.words:
                if tuple(text[1 - len(word) :]) == word[:-1]:
                    rows[count].view(np.uint8)[word[-1] // 8] &= 255 - (1 << word[-1] % 8)
        return rows

    def drafts(self, guesses: list[int]) -> list[int]:
        """See `Constraint.drafts`."""
        return guesses

    def advance(self, token: int) -> None:
        """See `Constraint.advance`."""
        self.num_early = max(0, self.num_early - 1)
        self.tail = [*self.tail, token][-max(map(len, self.words), default=1) :]

    def copy(self) -> TokenBans:
        """See `Constraint.copy`."""
        return replace(self)


@dataclass(slots=True, kw_only=True)
class Intersection:
    """What bans leave of what another constraint allows, which has always another token than those of the bans.
    Stop tokens that come too early are allowed where there is no other token."""

    bans: TokenBans
    other: Constraint
    reads_tokens: bool = True

    def masks(self, drafts: Sequence[int]) -> Masks | None:
        """See `Constraint.masks`."""
        allowed, kept = self.other.masks(drafts), self.bans.masks(drafts)
        if allowed is None or kept is None:
            return kept if allowed is None else allowed
        if not (allowed & kept).any():
            kept = replace(self.bans, num_early=0).masks(drafts)
        found = allowed if kept is None else allowed & kept
        if not found.any():
            raise DataError(
                "no token is left to continue a text with",
                got="a grammar, of whose tokens inference.suppress_tokens or inference.bad_words exclude all",
                expected="at least one token that both allow",
                fix="change the grammar, or suppress other tokens",
            )
        return found

    def drafts(self, guesses: list[int]) -> list[int]:
        """None: after a draft that only the bans exclude, the grammar may have no other token."""
        return []

    def advance(self, token: int) -> None:
        """See `Constraint.advance`."""
        self.bans.advance(token)
        self.other.advance(token)

    def copy(self) -> Intersection:
        """See `Constraint.copy`."""
        return Intersection(bans=self.bans.copy(), other=self.other.copy())


def bans_of(
    options: SamplingOptions, stop_ids: Collection[int], prompt: Sequence[int], vocab_size: int
) -> TokenBans | None:
    """The bans of some options for the continuation of a prompt; None where they exclude nothing. A publisher may name
    tokens that its network does not have."""
    words = tuple(word for word in options.bad_words if max(word) < vocab_size)
    never = set(options.suppress_tokens or ())
    early = stop_ids if options.min_new_tokens else ()
    if not (words or never or early):
        return None
    return TokenBans(
        lasting=_all_but(never, vocab_size),
        early=_all_but({*never, *early}, vocab_size),
        num_early=options.min_new_tokens,
        words=words,
        tail=list(prompt[-max(map(len, words), default=1) :]),
    )


def _all_but(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    kept = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    kept[[token for token in tokens if token < vocab_size]] = 0
    return np.packbits(kept, bitorder="little").view(np.int32)
