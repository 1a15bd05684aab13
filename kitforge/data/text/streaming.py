"""Streams of packed rows: documents are read, tokenized and packed during training, without a token cache.

A stream has one lane per sample of a batch: sample i of every batch is a row of lane i. Lanes read disjoint documents
and know nothing of ranks, so another rank can continue a lane. A lane shuffles blocks of documents. Its position is
where its block begins and how far it was packed; to resume, the lane reads that block again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.document_shard import DocumentShard, EncodingErrors, document_of
from kitforge.data.schedule import shuffled_indices
from kitforge.data.tokenizers.protocol import Tokenizer, document_frame
from kitforge.foundation.errors import DataError
from kitforge.foundation.seed import key
from kitforge.foundation.types import IGNORED

# Of a lane or of its documents: JSON values, and tensors of a user's `state_dict`.
Position: TypeAlias = list[Any]
_COLUMNS = ("tokens", "targets", "positions", "documents")


class DocumentReader(Protocol):
    """An endless sequence of documents with a position."""

    def position(self) -> Position:
        """Where the next document is read."""

    def documents(self, position: Position | None) -> Iterator[str]:
        """The documents from that position on; None: from the first one. The data begin again at their end."""


class ShardReader:
    """The documents of one lane: every `num_lanes`-th shard of an order that is new in each pass. With fewer shards
    than lanes, every lane reads all shards and takes every `num_lanes`-th document."""

    def __init__(
        self, shards: Sequence[DocumentShard], lane: int, num_lanes: int, *, seed: int, shuffle: bool = True
    ) -> None:
        self._shards = shards
        self._lane, self._num_lanes = lane, num_lanes
        self._seed, self._shuffle = key(seed, "shards"), shuffle
        self._position: Position = [0, 0, 0, 0]

    def position(self) -> Position:
        """Number of the pass, of the shard in it, of the document in the shard, and of the document in the pass."""
        return list(self._position)

    def documents(self, position: Position | None) -> Iterator[str]:
        """Raises DataError if the lane has no document, and for documents that cannot be read."""
        epoch, first, skipped, count = position or (0, 0, 0, 0)
        size = len(self._shards)
        own, stride = slice(self._lane, None, self._num_lanes), 1
        if size < self._num_lanes:
            own, stride = slice(None), self._num_lanes
        while True:
            order = shuffled_indices(self._seed, size, epoch * size, size, shuffle=self._shuffle)[own]
            is_empty = count == 0
            for number, index, text in self._read(order, first, skipped):
                if (count - self._lane) % stride == 0:
                    self._position, is_empty = [epoch, number, index + 1, count + 1], False
                    yield text
                count += 1
            skipped = 0
            if is_empty:
                raise DataError(
                    "a sample of the batch has no documents in the stream",
                    got=f"sample {self._lane} of data.batch_size={self._num_lanes}, {len(self._shards)} shards",
                    expected="at least one document for each sample of a batch",
                    fix="a smaller data.batch_size, more documents, or data.streaming=false",
                )
            epoch, first, count = epoch + 1, 0, 0

    def _read(self, order: NDArray[np.int64], first: int, skipped: int) -> Iterator[tuple[int, int, str]]:
        """Number of the shard, number of the document, document: from shard `first` on, without its first `skipped`
        documents."""
        for number in range(first, len(order)):
            texts = islice(self._shards[order[number]].documents(), skipped, None)
            yield from ((number, index, text) for index, text in enumerate(texts, skipped))
            skipped = 0


class IterableReader:
    """The documents of a user's iterable. With `state_dict` and `load_state_dict` it is resumed through them, otherwise
    by skipping the documents that were read."""

    def __init__(self, rows: Any, column: str, errors: EncodingErrors) -> None:
        self._rows = rows
        self._column, self._errors = column, errors
        self._has_state = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")
        self._position: tuple[int, int] = (0, 0)

    def position(self) -> Position:
        """Number of the pass, rows read in it, and the state of the iterable."""
        return [*self._position, self._rows.state_dict() if self._has_state and self._position[1] else None]

    def documents(self, position: Position | None) -> Iterator[str]:
        """Raises DataError if a pass has no document, or ends before the position."""
        epoch, count, state = position or (0, 0, None)
        while True:
            if state is not None:
                self._rows.load_state_dict(state)
            rows, is_empty = iter(self._rows), count == 0
            num_skipped = 0 if state is not None else sum(1 for _ in islice(rows, count))
            if state is None and num_skipped < count:
                raise DataError("the stream is shorter than before", got=num_skipped, expected=f"at least {count} rows")
            for row in rows:
                count += 1
                self._position = (epoch, count)
                if text := document_of(row, self._column, self._errors, f"row {count} of the stream"):
                    is_empty = False
                    yield text
            if is_empty:
                raise DataError(
                    "a pass over the stream has no document",
                    got=f"{type(self._rows).__name__} in pass {epoch + 1}",
                    expected="an iterable that can be iterated again, with at least one text that is not empty",
                    fix="a smaller trainer.max_steps, or a class with __iter__ in place of a generator",
                )
            epoch, count, state = epoch + 1, 0, None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How documents become rows."""

    batch_size: int  # rows of a batch, over all replicas
    length: int  # tokens of a row
    buffer: int  # documents that all lanes together hold for shuffling; at least one each
    seed: int
    shuffle: bool = True
    # One lane makes all rows, and every replica reads all of it: the documents cannot be divided beforehand.
    is_shared: bool = False

    @property
    def lane_buffer(self) -> int:
        """Documents that a lane holds."""
        return max(1, self.buffer if self.is_shared else self.buffer // self.batch_size)


class Lane:
    """Packed rows of one reader. Documents that continue in the next row do so with positions from 0."""

    def __init__(self, reader: DocumentReader, tokenizer: Tokenizer, options: StreamOptions, number: int) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self._length, self._buffer, self._shuffle = options.length, options.lane_buffer, options.shuffle
        self._seed = key(options.seed, "lane", number)
        self._start: Position | None = None
        self._block = self._index = self._offset = 0
        self.seek(None)

    def position(self) -> Position:
        """Where the block begins, its number, the number of the document in it, and its tokens that were packed."""
        return [self._start, self._block, self._index, self._offset]

    def seek(self, position: Position | None) -> None:
        """Go on at a position; None: at the first document."""
        self._start, self._block, self._index, self._offset = position or (None, 0, 0, 0)
        self._documents = self._reader.documents(self._start)
        self._texts: list[str] = []
        self._tokens: NDArray[np.int64] = np.zeros(0, np.int64)
        if position is not None:
            self._read_block()
            self._tokens = self._encode(self._texts[self._index])

    def row(self) -> dict[str, NDArray[np.int64]]:
        """The next row: tokens, targets, positions and documents [length], as in `PackedRows`."""
        row = {name: np.zeros(self._length, np.int64) for name in _COLUMNS}
        filled = number = 0
        while filled < self._length:
            if self._offset == len(self._tokens):
                self._index, self._offset = self._index + 1, 0
                if self._index >= len(self._texts):
                    is_first = not self._texts and self._start is None
                    self._block, self._index = (0 if is_first else self._block + 1), 0
                    self._start = None if is_first else self._reader.position()
                    self._read_block()
                self._tokens = self._encode(self._texts[self._index])
            count = min(len(self._tokens) - self._offset, self._length - filled)
            part, end = slice(filled, filled + count), self._offset + count
            row["tokens"][part] = self._tokens[self._offset : end]
            # The last token of a document has no successor.
            row["targets"][part] = np.append(self._tokens[self._offset + 1 : end + 1], IGNORED)[:count]
            row["positions"][part], row["documents"][part] = np.arange(count), number
            self._offset, filled, number = end, filled + count, number + 1
        return row

    def _read_block(self) -> None:
        # The last block is dropped before the next is read, so that no more than `buffer` documents are held.
        self._texts = []
        self._texts = list(islice(self._documents, self._buffer))
        size = len(self._texts)
        order = shuffled_indices(key(self._seed, "block", self._block), size, 0, size, shuffle=self._shuffle)
        self._texts = [self._texts[index] for index in order]

    def _encode(self, text: str) -> NDArray[np.int64]:
        before, after = document_frame(self._tokenizer)
        return np.concatenate([before, self._tokenizer.encode_array(text), after]).astype(np.int64)


class TextStream:
    """The training rows of a run, as endless batches. `reader` makes the reader of a lane."""

    def __init__(self, reader: Callable[[int], DocumentReader], tokenizer: Tokenizer, options: StreamOptions) -> None:
        self._reader, self._tokenizer, self._options = reader, tokenizer, options
        self.num_lanes = 1 if options.is_shared else options.batch_size

    def batches(
        self, part: slice, positions: Mapping[str, Position]
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Position]]]:
        """The rows `part` of every batch [rows, length], from these positions of the lanes on; with the positions of
        this replica's lanes after the batch."""
        numbers = range(1) if self._options.is_shared else range(part.start, part.stop)
        lanes = {str(number): Lane(self._reader(number), self._tokenizer, self._options, number) for number in numbers}
        for number, lane in lanes.items():
            lane.seek(positions.get(number))
        while True:
            if self._options.is_shared:
                rows = [lanes["0"].row() for _ in range(self._options.batch_size)][part]
            else:
                rows = [lane.row() for lane in lanes.values()]
            columns = {name: torch.from_numpy(np.array([row[name] for row in rows], np.int64)) for name in _COLUMNS}
            columns["documents"] = columns["documents"].int()
            yield columns, {number: lane.position() for number, lane in lanes.items()}
