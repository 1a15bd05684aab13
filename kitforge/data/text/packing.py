"""Packing: documents are concatenated and cut to rows of equal length without losing or repeating a token.

Shapes: rows is the number of requested rows, length the tokens of a row. A run is the part of one document in one row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.splitmix64 import hash_array
from kitforge.data.text.token_cache import TokenCache
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError
from kitforge.foundation.seed import key
from kitforge.foundation.types import IGNORED

# With fewer documents every document is split instead.
_ENOUGH_DOCUMENTS = 20
# Documents per entry of the index in memory. A row reads the offsets of a whole block.
_BLOCK_DOCUMENTS = 128
# Documents per pass of building the index.
_DOCUMENT_BATCH = 16384

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSplit:
    """A part of a corpus: all of it, some documents, or one end of every document. A rule without memory per
    document."""

    rule: Literal["all", "documents", "tail"]
    fraction: float = 0.0  # validation fraction: of the documents, or of the tokens of each document
    key: int = 0  # of the hash that selects documents
    is_held_out: bool = False  # the validation part, or the training part

    def cut(self, numbers: Integers, begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
        """The tokens of documents that belong to the part: first token, and the one after the last.

        All arrays have one shape. A document outside the part is an empty range.
        """
        if self.rule == "tail":
            cuts = ends - np.round((ends - begins) * self.fraction).astype(np.int64)
            return (cuts, ends) if self.is_held_out else (begins, cuts)
        if self.rule == "documents":
            is_held_out = _chances(numbers, self.key) < self.fraction
            ends = np.where(is_held_out == self.is_held_out, ends, begins)
        return begins, ends


def split_documents(cache: TokenCache, fraction: float, seed: int) -> tuple[DocumentSplit, DocumentSplit | None]:
    """The training and validation parts; no validation part for `fraction` 0.

    A document is in the validation part if the hash of its number and the seed is below `fraction`, so that it stays in
    its part when documents are added. In a corpus of fewer than 20 documents the last `fraction` of the tokens of each
    document is the validation part.
    """
    check(0 <= fraction < 1, "data.eval_fraction", fraction, "a number from 0 to below 1")
    if fraction == 0:
        return DocumentSplit(rule="all"), None
    if cache.num_documents < _ENOUGH_DOCUMENTS:
        remaining = DocumentSplit(rule="tail", fraction=fraction)
    else:
        scrambled = key(seed, "validation")
        fraction = _effective(fraction, cache.num_documents, scrambled)
        remaining = DocumentSplit(rule="documents", fraction=fraction, key=scrambled)
    return remaining, replace(remaining, is_held_out=True)


def _chances(numbers: Integers, key_: int) -> NDArray[np.float64]:
    """A hash from 0 to 1 per document."""
    return hash_array(numbers.astype(np.uint64), key_) / 2.0**64


def _effective(fraction: float, num_documents: int, key_: int) -> float:
    """The fraction, adjusted so that both parts have a document."""
    lowest, highest = 1.0, 0.0
    for first in range(0, num_documents, _DOCUMENT_BATCH):
        chances = _chances(np.arange(first, min(first + _DOCUMENT_BATCH, num_documents)), key_)
        lowest, highest = min(lowest, float(chances.min())), max(highest, float(chances.max()))
        if lowest < fraction <= highest:
            return fraction
    return highest if highest < fraction else math.nextafter(lowest, 1.0)


@dataclass(slots=True, kw_only=True, eq=False)
class _Runs:
    """The runs of rows; every field is [runs]."""

    positions: Integers  # of the run in its row
    begins: Integers  # in the stream
    addresses: Integers  # of the run's first token in the cache
    lengths: Integers
    after: Integers  # where the run ends in the concatenated rows
    go_on: NDArray[np.bool_]  # whether the document has more tokens


class PackedRows:
    """Rows of `length` inputs out of one virtual stream of documents; row i predicts tokens i*length+1 .. (i+1)*length.

    Every token but a document's first is a target once. The last row is filled with `pad_id`. Two numbers stay in
    memory for each block of 128 documents; where the documents of a block begin is read when a row needs it.
    """

    def __init__(self, cache: TokenCache, *, length: int, pad_id: int, part: DocumentSplit | None = None) -> None:
        """Take all documents of the cache, or a part of them.

        Raises DataError when the corpus holds less than one row, or the part of it not a single target.
        """
        check(length >= 1, "data.sequence_length", length, "a positive number")
        if cache.num_tokens < length + 1:
            raise DataError(
                "the corpus is shorter than one row",
                got=f"{cache.num_tokens} tokens",
                expected=f"at least {length + 1}",
                fix=f"a smaller data.sequence_length (at most {cache.num_tokens - 1}), or more text",
            )
        self.length = length
        self._tokens, self._offsets = np.asarray(cache.tokens), np.asarray(cache.offsets)
        self._part = part or DocumentSplit(rule="all")
        self._pad_id = pad_id
        # The part's tokens in each block of the cache, [blocks], and how many of its documents hold a token.
        num_blocks = -(-(len(self._offsets) - 1) // _BLOCK_DOCUMENTS)
        num_tokens, num_documents = np.zeros(num_blocks, dtype=np.int64), 0
        for first in range(0, num_blocks, _DOCUMENT_BATCH // _BLOCK_DOCUMENTS):
            some = np.arange(first, min(first + _DOCUMENT_BATCH // _BLOCK_DOCUMENTS, num_blocks))
            lengths = self._documents(some)[1]
            num_tokens[some] = lengths.sum(axis=1)
            num_documents += int(np.count_nonzero(lengths))
        self.num_targets = int(num_tokens.sum()) - num_documents
        if self.num_targets < 1:
            raise DataError(
                "a part of the corpus holds nothing to predict",
                got=f"{num_documents} documents of one token",
                expected="a document of at least two tokens",
                fix="more text, or another data.eval_fraction",
            )
        # Blocks with tokens of the part, their offsets in the stream, and the length of the stream.
        self._blocks = np.flatnonzero(num_tokens)
        self._edges = np.concatenate([[0], num_tokens[self._blocks].cumsum()])
        self.num_rows = -(-(int(self._edges[-1]) - 1) // length)
        # The filling of the last row is one more block with one document, read from the head of the cache and then
        # overwritten.
        self._blocks = np.append(self._blocks, 0)

    def _documents(self, blocks: Integers) -> tuple[Integers, Integers]:
        """The first token, and how many there are, of what each document of these blocks adds, [blocks, 128]."""
        numbers = blocks[:, None] * _BLOCK_DOCUMENTS + np.arange(_BLOCK_DOCUMENTS + 1)
        # Documents beyond the corpus are empty.
        edges = self._offsets.take(numbers, mode="clip")
        begins, ends = self._part.cut(numbers[:, :-1], edges[:, :-1], edges[:, 1:])
        return begins, ends - begins

    def rows(self, indices: NDArray[np.integer]) -> dict[str, Tensor]:
        """Rows by number, as new tensors [rows, length].

        `tokens` int64; `targets` int64, -100 if the next token belongs to another document or is padding;
        `positions` int64, from 0 at each document's first token in the row; `documents` int32, from 0 in each row.
        Raises IndexError for invalid numbers.
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= self.num_rows):
            raise IndexError(f"rows are numbered 0 to {self.num_rows - 1}, got {indices.min()} to {indices.max()}")
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
        for run in np.flatnonzero(runs.begins == self._edges[-1]):
            filling = slice(runs.after[run] - runs.lengths[run], runs.after[run])
            tokens[filling], targets[filling] = self._pad_id, IGNORED
        columns = {
            "tokens": tokens,
            "targets": targets,
            "positions": positions,
            "documents": runs.positions.astype(np.int32).repeat(runs.lengths),
        }
        return {name: torch.from_numpy(column).view(len(indices), self.length) for name, column in columns.items()}

    def _runs(self, begins: Integers) -> _Runs:
        """The runs of rows with these offsets [rows] in the stream."""
        first = self._edges.searchsorted(begins, side="right") - 1
        num_blocks = self._edges.searchsorted(begins + self.length, side="left") - first
        # A pair for each row and each block that it overlaps; then its part of the block's documents.
        rows = np.arange(len(begins)).repeat(num_blocks)
        blocks = first.repeat(num_blocks) + _count_up(num_blocks)
        addresses, lengths = self._documents(self._blocks[blocks])
        is_filling = blocks == len(self._blocks) - 1
        addresses[is_filling], lengths[is_filling] = 0, 0
        lengths[is_filling, 0] = self.num_rows * self.length - self._edges[-1]
        # Where the documents end in the stream.
        ends = lengths.cumsum(axis=1)
        ends += self._edges[blocks][:, None]
        first_token = begins[rows][:, None]
        is_run = (ends > first_token) & (ends - lengths < first_token + self.length) & (lengths > 0)
        runs = np.flatnonzero(is_run)
        ends, lengths, rows = ends.ravel()[runs], lengths.ravel()[runs], rows[runs // _BLOCK_DOCUMENTS]
        starts: Integers = ends - lengths
        run_begins = np.maximum(starts, begins[rows])
        run_ends = np.minimum(ends, begins[rows] + self.length)
        run_lengths = run_ends - run_begins
        return _Runs(
            positions=_count_up(np.bincount(rows, minlength=len(begins))),
            begins=run_begins,
            addresses=addresses.ravel()[runs] + run_begins - starts,
            lengths=run_lengths,
            after=run_lengths.cumsum(),
            go_on=run_ends < ends,
        )


class ConcatenatedRows:
    """The rows of several corpora, numbered one corpus after the other."""

    def __init__(self, parts: Sequence[PackedRows]) -> None:
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(part.num_rows for part in parts)])
        self.num_rows = int(self._starts[-1])

    def rows(self, indices: NDArray[np.integer]) -> dict[str, Tensor]:
        """Those rows, as `PackedRows.rows` returns them."""
        if len(indices) == 0:
            return self._parts[0].rows(indices)
        numbers = self._starts.searchsorted(indices, side="right") - 1
        members = {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}
        found = [self._parts[number].rows(indices[own] - self._starts[number]) for number, own in members.items()]
        # From the order of the corpora back to that of the indices.
        order = torch.from_numpy(np.argsort(np.concatenate(list(members.values()))))
        return {name: torch.cat([each[name] for each in found])[order] for name in found[0]}


def _count_up(counts: Integers) -> Integers:
    """0 .. count - 1 for each count, concatenated."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
