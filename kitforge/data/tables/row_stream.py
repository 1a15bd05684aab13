"""A stream of rows from an iterator. Rows are kept until they are marked as trained, so that a resume loses none."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import CellRules, contents
from kitforge.data.tables.columns import ColumnLayout, Columns, concatenate
from kitforge.data.tables.python_rows import chunk_of
from kitforge.foundation.errors import DataError, nearest


@runtime_checkable
class SeekableSource(Protocol):
    """An iterator of rows with seek, such as a consumer of a Kafka partition. Checkpoints hold its position.

    Positions are JSON values. The reading thread calls `position`.
    """

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...

    def __next__(self) -> Mapping[str, Any]: ...

    def position(self) -> Any:
        """The position of the row that `next` would return."""

    def seek(self, position: Any) -> None:
        """Move to a position: `next` returns its row."""


class RowStream:
    """Reads a source on demand, never ahead. One thread reads; another one may mark rows and take the state."""

    def __init__(self, source: Iterator[Any], layout: ColumnLayout, cells: CellRules) -> None:
        self._source = source
        self._cells = cells
        self._seekable = source if isinstance(source, SeekableSource) else None
        self._layout = layout
        # Pairs (position or None, row). Rows in `_unread` were read before and are read again before the source
        # continues.
        self._unread: deque[tuple[Any, object]] = deque()
        self._untrained: deque[tuple[Any, object]] = deque()
        self._batches: deque[int] = deque()  # rows of each batch that was read, skipped ones included
        self._position = None if self._seekable is None else self._seekable.position()
        self._num_read = 0
        self._is_checked = False  # whether the first row has been checked
        self._is_closed = False
        self._lock = Lock()

    def read(self, num_rows: int, bad: BadRows) -> Columns | None:
        """The next valid rows: `num_rows`, fewer at the end of the source, None after it."""
        parts: list[Columns] = []
        num_good = num_pulled = 0
        while num_good < num_rows and (rows := self._pull(num_rows - num_good)):
            chunk = chunk_of(rows, self._num_read - len(rows), self._layout.names)
            columns, bad_rows = to_columns(self._cells.apply(chunk), self._layout)
            bad.handle(bad_rows)
            num_good, num_pulled = num_good + len(columns), num_pulled + len(rows)
            parts.append(columns)
        if num_good == 0:
            return None
        with self._lock:
            self._batches.append(num_pulled)
        return concatenate(parts)

    def rewind(self) -> None:
        """Read all rows again that are not marked as trained."""
        with self._lock:
            self._num_read -= len(self._untrained)
            self._unread.extendleft(reversed(self._untrained))
            self._untrained.clear()
            self._batches.clear()

    def mark_trained(self) -> None:
        """Mark the oldest batch as trained and drop its rows."""
        with self._lock:
            for _ in range(self._batches.popleft()):
                self._untrained.popleft()

    def close(self) -> None:
        """Stop reading, also in a thread that waits for the source."""
        self._is_closed = True

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: the untrained rows of a source without positions, and the next position."""
        with self._lock:
            waiting = [*self._untrained, *self._unread]
            position = self._position
        kept: list[object] = [
            {name: _plain(row[name]) for name in self._layout.names if name in row}
            if isinstance(row, Mapping)
            else str(row)
            for source_state, row in waiting
            if source_state is None
        ]
        position = next((index for index, _ in waiting if index is not None), position)
        return {"rows": json.dumps(kept), "position": position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. A source without seek continues with its next row after the rows of the state."""
        self._is_checked = True
        self._unread.extendleft((None, row) for row in reversed(json.loads(state["rows"])))
        if self._seekable is not None and state["position"] is not None:
            self._seekable.seek(state["position"])
            self._position = state["position"]

    def _pull(self, num_rows: int) -> list[object]:
        rows: list[object] = []
        while len(rows) < num_rows and not self._is_closed:
            with self._lock:
                pair = self._unread.popleft() if self._unread else None
                if pair is not None:
                    self._untrained.append(pair)
            if pair is None:
                # The lock is not held here: a live source may wait for a long time.
                try:
                    pair = (self._position, next(self._source))
                except StopIteration:
                    break
                if not self._is_checked:
                    self._check_first(pair[1])
                position = None if self._seekable is None else self._seekable.position()
                with self._lock:
                    self._untrained.append(pair)
                    self._position = position
            rows.append(pair[1])
        self._num_read += len(rows)
        return rows

    def _check_first(self, row: object) -> None:
        self._is_checked = True
        if not isinstance(row, Mapping):
            raise DataError(
                "these are no rows of a table", got=type(row).__name__, expected="mappings from column to value"
            )
        for name in self._layout.names:
            if name not in row:
                raise DataError(
                    f"the rows have no column {name!r}",
                    got=f"columns {', '.join(map(str, row))}",
                    expected=f"a column {name!r}",
                    fix=nearest(name, map(str, row)),
                )


def _plain(value: object) -> object:
    """A cell as a JSON value; values that no column can hold become text, as in reading."""
    value = contents(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item) for item in value]
    return bytes(value).decode() if isinstance(value, (bytes, bytearray)) else str(value)
