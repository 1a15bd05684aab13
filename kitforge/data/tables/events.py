"""Rows of events (user, item, time) as sequences: a row a user with all items in order of time, or a row an event with
the items that the user took before it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, Problem
from kitforge.data.tables.cells import join_tables, one_array, pyarrow
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, ListValues, NamedColumns
from kitforge.data.tables.part import Job, TablePart
from kitforge.data.tables.source import TableSource
from kitforge.data.tables.times import Times, with_times
from kitforge.foundation.config import check, check_least
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger

_log = logger(__name__)

# Events of a chunk, but for a user with more.
_CHUNK_EVENTS = 16_384
# Events that are held before those that max_events leaves out are let go.
_HELD_EVENTS = 2**20
_ROW = "__row"
_NO_TIME = Problem(reason="has no time", got="nothing", expected="a number or an ISO 8601 date in every row")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventColumns:
    """The user, item and time columns of a table of events. Events of the same time stay in row order."""

    user: str
    item: str
    time: str  # numbers, dates, or ISO 8601 texts
    # None: a row a user, with lists in order of time. A name: a row an event, and in a column of this name the user's
    # items before it.
    history: str | None = None
    history_length: int = 50  # the newest items of a history that are kept
    max_events: int | None = None  # of each user the newest so many are kept; None: all

    def __post_init__(self) -> None:
        names = [self.user, self.item, self.time, *([] if self.history is None else [self.history])]
        check(len(set(names)) == len(names), "data.schema.events", names, "a different column for each")
        check_least("data.schema.events", self, 1, "history_length", "max_events")


def sequences_of(source: TableSource, events: EventColumns, lists: Sequence[str]) -> TableSource:
    """The source with its events put together by user, in order of time. `lists`: columns that become lists where a row
    is a user; any other has the value of the user's newest event. Raises DataError for rows that come once."""
    if source.is_once:
        raise DataError(
            "events that come once cannot be sorted",
            got="an iterator",
            expected="a file, a list or a dataset",
            fix="leave data.schema.events out, and hand over rows that hold sequences",
        )
    dated = replace(source, times=(events.time,))
    rows = EventRows(source=dated, events=events, lists=tuple(lists))
    part = TablePart(name=source.name, find_names=lambda: rows.names, chunks=rows.jobs)
    mark = None if source.fingerprint is None else fingerprint_of("events", 1, source.fingerprint, events, rows.lists)
    return replace(dated, parts=(part,), fingerprint=mark, cells=replace(source.cells, missing_values=()), times=())


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRows:
    """Events put together by user. All columns that are asked for are held in memory while they are sorted."""

    source: TableSource
    events: EventColumns
    lists: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the events, and that of the histories."""
        history, names = self.events.history, self.source.parts[0].names
        return names if history is None else (*names, history)

    def jobs(self, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
        """Chunks of whole users, in the order of their first events."""
        held, users, bad = self._read(columns)
        if not len(users):
            nothing = pyarrow().table({name: pyarrow().nulls(0) for name in columns})
            yield partial(ArrowChunk, table=nothing, location=str, bad=tuple(bad))
            return
        make = self._users if self.events.history is None else self._histories
        for start, stop in _cuts(users.offsets):
            chosen = users.take(np.arange(start, stop))
            yield partial(make, held.take(chosen.values), chosen, columns, tuple(bad))
            bad = []

    def _read(self, columns: Sequence[str]) -> tuple[Any, ListValues, list[BadRow]]:
        """The good events, which of them each user has in order of time, and the bad ones."""
        events = self.events
        own = [name for name in (events.user, events.item, *columns) if name != events.history]
        wanted = list(dict.fromkeys([*own, events.time]))
        tables: list[Any] = []
        users, times, bad, num_read, limit = np.zeros(0, np.int64), Times.empty(), list[BadRow](), 0, _HELD_EVENTS
        for job in self.source.jobs(wanted):
            table, more_users, more_times, more_bad = self._part(job())
            tables.append(table.select(list(dict.fromkeys(own))))
            users, times = np.append(users, more_users), Times.joined([times, more_times])
            bad += more_bad
            num_read += len(more_users)
            if events.max_events is not None and len(users) > limit:
                kept = np.sort(_by_user(users, times, events.max_events).values)
                tables, users, times = [_joined(tables).take(kept)], users[kept], times.take(kept)
                limit = max(_HELD_EVENTS, 2 * len(users))
        lists = _by_user(users, times, events.max_events)
        if len(lists.values) < num_read:
            count = num_read - len(lists.values)
            words = "%s: %s of %s events are left out, since their users have %s newer ones (events.max_events)"
            _log.warning(words, self.source.name, f"{count:,}", f"{num_read:,}", events.max_events)
        return _joined(tables), lists, bad

    def _part(self, chunk: ArrowChunk) -> tuple[Any, Ints, Times, list[BadRow]]:
        """The good events of a chunk, their users and times, and the bad ones."""
        arrow, events = pyarrow(), self.events
        table = chunk.table.append_column(_ROW, arrow.array(np.arange(chunk.table.num_rows)))
        keys = tuple(KeyColumn(name=name, is_required=True) for name in (events.user, events.item))
        layout = with_times(ColumnLayout(numbers=(_ROW,), keys=keys), events.time)
        columns, bad = to_columns(replace(chunk, table=table), layout)
        named = NamedColumns(columns, layout)
        rows, users, times = named.numbers(_ROW).astype(np.int64), columns.keys[:, 0], Times.of(named, events.time)
        timeless = np.isnan(times.fraction)
        bad += [BadRow(problem=_NO_TIME, location=partial(chunk.location, int(row))) for row in rows[timeless]]
        return chunk.table.take(rows[~timeless]), users[~timeless], times.take(~timeless), bad

    def _users(self, table: Any, users: ListValues, columns: tuple[str, ...], bad: tuple[BadRow, ...]) -> ArrowChunk:
        """A row a user."""
        arrays = {}
        for name in columns:
            values = one_array(table.column(name))
            is_list = name in self.lists
            arrays[name] = _lists(users.offsets, values) if is_list else values.take(users.offsets[1:] - 1)
        return ArrowChunk(
            table=pyarrow().table(arrays), location=partial(self._location, table, users.offsets[:-1]), bad=bad
        )

    def _histories(
        self, table: Any, users: ListValues, columns: tuple[str, ...], bad: tuple[BadRow, ...]
    ) -> ArrowChunk:
        """A row an event."""
        history, length = self.events.history, self.events.history_length
        positions = np.arange(len(users.values))
        starts = np.repeat(users.offsets[:-1], users.lengths)
        lengths = np.minimum(positions - starts, length)
        offsets = np.append(0, np.cumsum(lengths))
        before = np.arange(offsets[-1]) + np.repeat(positions - lengths - offsets[:-1], lengths)
        arrays = {}
        for name in columns:
            values = one_array(table.column(self.events.item if name == history else name))
            arrays[name] = _lists(offsets, values.take(before)) if name == history else values
        return ArrowChunk(table=pyarrow().table(arrays), location=partial(self._location, table, positions), bad=bad)

    def _location(self, table: Any, rows: Ints, row: int) -> str:
        return f"{self.source.name}, user {table.column(self.events.user)[int(rows[row])].as_py()},"


def _by_user(users: Ints, times: Times, most: int | None) -> ListValues:
    """The numbers of the newest `most` events of each user in order of time, users by their first rows."""
    order = np.lexsort((times.fraction, times.whole, users))
    ends = np.append(np.flatnonzero(users[order][1:] != users[order][:-1]) + 1, len(users)) if len(users) else order
    offsets = np.append(0, ends).astype(np.int64)
    firsts = np.minimum.reduceat(order, offsets[:-1]) if len(users) else order
    result = ListValues(values=order, offsets=offsets).take(np.argsort(firsts))
    if most is None:
        return result
    lengths = np.minimum(result.lengths, most)
    starts = np.append(0, np.cumsum(lengths))
    chosen = np.arange(starts[-1]) + np.repeat(result.offsets[1:] - starts[1:], lengths)
    return ListValues(values=result.values[chosen], offsets=starts)


def _cuts(offsets: Ints) -> Iterator[tuple[int, int]]:
    """First and last user, but one, of each chunk."""
    start = 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + _CHUNK_EVENTS, side="right")) - 1
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def _joined(tables: Sequence[Any]) -> Any:
    """One table. Texts have 64-bit offsets, since there may be more of them than a chunk holds."""
    arrow, whole = pyarrow(), join_tables(tables)
    fields = [
        field.with_type(arrow.large_string()) if arrow.types.is_string(field.type) else field for field in whole.schema
    ]
    return whole.cast(arrow.schema(fields)).combine_chunks()


def _lists(offsets: Ints, values: Any) -> Any:
    return pyarrow().LargeListArray.from_arrays(pyarrow().array(offsets, pyarrow().int64()), values)
