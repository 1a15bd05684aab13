"""Documents laid end to end and cut into rows of equal length, none losing or sharing a token. Knows no order.

Shapes: rows is the number of rows asked for, length the tokens of a row; a run is what one row holds of one document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.scramble import scramble
from kitforge.data.token_cache import TokenCache
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError
from kitforge.foundation.seed import key

# What the loss passes over.
IGNORED = -100
# With fewer documents a split by document would be a matter of luck.
_ENOUGH_DOCUMENTS = 20

Integers = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Some of a corpus: whole documents, or a range of tokens of every document. One of the two is set."""

    rule: Literal["documents", "tail"]
    documents: Integers | None = None  # indices, rising
    bounds: Integers | None = None  # [ranges, 2]: first token and the one after the last


def split_documents(cache: TokenCache, fraction: float, seed: int) -> tuple[Part, Part | None]:
    """The parts to train on and to validate on; no validation part when `fraction` is 0.

    A document belongs to the validation part when its number, scrambled with the seed, falls below `fraction`; so it
    stays where it is when others are added. In a corpus of fewer than 20 documents the last `fraction` of each one's
    tokens is validation instead.
    """
    check(0 <= fraction < 1, "data.validation", fraction, "a number from 0 to below 1")
    everything = np.arange(cache.num_documents, dtype=np.int64)
    if fraction == 0:
        return Part(rule="documents", documents=everything), None
    if cache.num_documents < _ENOUGH_DOCUMENTS:
        return _split_tails(cache, fraction)
    chances = scramble(everything.astype(np.uint64), key(seed, "validation")) / 2.0**64
    held_out = chances < fraction
    # Neither part may be empty, however small or large the fraction.
    held_out[np.argmin(chances)], held_out[np.argmax(chances)] = True, False
    return (
        Part(rule="documents", documents=everything[~held_out]),
        Part(rule="documents", documents=everything[held_out]),
    )


def _split_tails(cache: TokenCache, fraction: float) -> tuple[Part, Part]:
    begins, ends = cache.offsets[:-1], cache.offsets[1:]
    cuts = ends - np.round((ends - begins) * fraction).astype(np.int64)
    return (
        Part(rule="tail", bounds=np.stack([begins, cuts], axis=1)),
        Part(rule="tail", bounds=np.stack([cuts, ends], axis=1)),
    )


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _Runs:
    """What rows hold, run by run; every field is [runs]."""

    places: Integers  # of the run in its row
    documents: Integers  # in the order of the stream
    addresses: Integers  # of the run's first token in the cache
    lengths: Integers
    after: Integers  # where the run ends in the rows laid end to end
    go_on: NDArray[np.bool_]  # whether the document has more tokens


@final
class PackedRows:
    """Rows of `length` inputs out of one virtual stream of documents; row i predicts tokens i*length+1 .. (i+1)*length.

    Every token but a document's first is a target once. The last row is filled with `pad_id`.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        length: int,
        pad_id: int,
        documents: NDArray[np.integer] | None = None,
        bounds: NDArray[np.integer] | None = None,
    ) -> None:
        """Take all documents of the cache, the chosen `documents` (indices), or the token ranges `bounds` [ranges, 2].

        Raises DataError when the corpus holds less than one row, or what was chosen of it not a single target.
        """
        check(length >= 1, "data.sequence_length", length, "a positive number")
        if cache.num_tokens < length + 1:
            raise DataError(
                "the corpus is shorter than one row",
                got=f"{cache.num_tokens} tokens",
                expected=f"at least {length + 1}",
                fix=f"a smaller data.sequence_length (at most {cache.num_tokens - 1}), or more text",
            )
        begins, ends = _ranges(cache, documents, bounds)
        self.length = length
        self.num_targets = int((ends - begins).sum()) - len(begins)
        if self.num_targets < 1:
            raise DataError(
                "a part of the corpus holds nothing to predict",
                got=f"{len(begins)} documents of one token",
                expected="a document of at least two tokens",
                fix="more text, or another data.validation",
            )
        self._tokens = np.asarray(cache.tokens)
        self._pad_id = pad_id
        # Where each document begins in the stream, then where the stream ends.
        self._edges = np.concatenate([[0], np.cumsum(ends - begins)])
        self._num_tokens = int(self._edges[-1])
        self.num_rows = -(-(self._num_tokens - 1) // length)
        # The filling of the last row is one more document, read from the head of the cache and then overwritten.
        self._edges = np.append(self._edges, max(self._num_tokens, self.num_rows * length))
        # From a place in the stream to the place in the cache, for each document.
        self._shifts = np.append(begins, 0) - self._edges[:-1]

    def rows(self, indices: NDArray[np.integer]) -> dict[str, Tensor]:
        """The rows of these numbers, as new tensors of [rows, length].

        `tokens` int64; `targets` int64, -100 where the next token belongs to another document or is filling;
        `positions` int64, from 0 at each document's first token in the row; `documents` int32, from 0 in each row.
        """
        is_last_asked = self._check_rows(indices)
        runs = self._runs(indices.astype(np.int64) * self.length)
        positions = np.arange(len(indices) * self.length)
        positions -= (runs.after - runs.lengths).repeat(runs.lengths)
        addresses = runs.addresses.repeat(runs.lengths)
        addresses += positions
        tokens = self._tokens[addresses].astype(np.int64)
        # A run's last token has no successor in the row: it is the next row's first, or none where the document ends.
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        successors = self._tokens.take(runs.addresses + runs.lengths, mode="clip").astype(np.int64)
        targets[runs.after - 1] = np.where(runs.go_on, successors, IGNORED)
        if is_last_asked:
            for run in np.flatnonzero(runs.documents == len(self._shifts) - 1):
                filling = slice(runs.after[run] - runs.lengths[run], runs.after[run])
                tokens[filling], targets[filling] = self._pad_id, IGNORED
        columns = {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "documents": runs.places.astype(np.int32).repeat(runs.lengths),
        }
        return {name: torch.from_numpy(column).view(len(indices), self.length) for name, column in columns.items()}

    def _runs(self, begins: Integers) -> _Runs:
        """The runs of rows that begin at these places of the stream, [rows]."""
        edges = self._edges
        first = edges.searchsorted(begins, side="right") - 1
        num_runs = edges.searchsorted(begins + self.length, side="left") - first
        places = np.arange(num_runs.sum()) - (num_runs.cumsum() - num_runs).repeat(num_runs)
        documents = places + first.repeat(num_runs)
        row_begins = begins.repeat(num_runs)
        document_ends = edges[documents + 1]
        run_begins = np.maximum(edges[documents], row_begins)
        run_ends = np.minimum(document_ends, row_begins + self.length)
        lengths = run_ends - run_begins
        return _Runs(
            places=places,
            documents=documents,
            addresses=run_begins + self._shifts[documents],
            lengths=lengths,
            after=lengths.cumsum(),
            go_on=run_ends < document_ends,
        )

    def _check_rows(self, indices: NDArray[np.integer]) -> bool:
        """Whether the last row is among them. Raises IndexError for a number that is no row's."""
        if len(indices) == 0:
            return False
        lowest, highest = indices.min(), indices.max()
        if lowest < 0 or highest >= self.num_rows:
            raise IndexError(f"rows are numbered 0 to {self.num_rows - 1}, got {lowest} to {highest}")
        return bool(highest == self.num_rows - 1)


def _ranges(
    cache: TokenCache, documents: NDArray[np.integer] | None, bounds: NDArray[np.integer] | None
) -> tuple[Integers, Integers]:
    """First token and the one after the last of every range that holds a token, in the order given."""
    if bounds is not None:
        begins, ends = bounds[:, 0].astype(np.int64), bounds[:, 1].astype(np.int64)
    else:
        chosen = slice(None) if documents is None else documents
        begins, ends = cache.offsets[:-1][chosen], cache.offsets[1:][chosen]
    is_filled = ends > begins
    return begins[is_filled], ends[is_filled]
