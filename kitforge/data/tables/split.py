"""Which rows are trained on and which are kept for evaluation: a pure function of the rule, never of ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.columns import ColumnTable, NamedColumns
from kitforge.data.tables.times import Times
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.seed import key

# random: one of every so many rows, anywhere; last: the last rows, as time goes; group: all rows of some groups; time:
# the newest rows by a column.
SplitRule = Literal["random", "last", "group", "time"]

_CHUNK_ROWS = 65_536


class RowSet(ABC):
    """Some rows of a table, numbered anew from 0."""

    num_rows: int

    @abstractmethod
    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The table's numbers of these rows [n]."""


class RowRange(RowSet):
    """Rows start .. stop - 1."""

    def __init__(self, start: int, stop: int) -> None:
        self.num_rows = stop - start
        self._start = start

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices + self._start


class RowList(RowSet):
    """Rows by their numbers, 8 bytes each."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        self.num_rows = len(rows)
        self._rows = rows

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._rows[indices]


class HashedSplit(RowSet):
    """One row out of each group of `period` neighbours, by the hash of the group's number; or all the others.

    A row's number is computed, so nothing is kept, however many rows there are.
    """

    def __init__(self, num_rows: int, period: int, seed: int, *, is_validation: bool) -> None:
        self._period, self._key, self._is_validation = period, key(seed, "validation"), is_validation
        groups, remaining = divmod(num_rows, period)
        picked = groups + int(self._positions(np.array([groups]))[0] < remaining)
        self.num_rows = picked if is_validation else num_rows - picked

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._is_validation:
            return indices * self._period + self._positions(indices)
        groups, positions = np.divmod(indices, self._period - 1)
        return groups * self._period + positions + (positions >= self._positions(groups))

    def _positions(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which row of each group is picked."""
        return (hash_array(groups.astype(np.uint64), self._key) % np.uint64(self._period)).astype(np.int64)


def split_rows(
    table: ColumnTable, rule: SplitRule, fraction: float, seed: int, group: str | None = None, time: str | None = None
) -> tuple[RowSet, RowSet]:
    """Rows to train on and rows to evaluate on. `random` computes a share of one in so many rows, and lists any other.
    `group` and `time` name the columns of those rules."""
    num_rows = table.num_rows
    if fraction == 0:
        return RowRange(0, num_rows), RowRange(num_rows, num_rows)
    if rule == "last":
        cut = num_rows - round(num_rows * fraction)
        return RowRange(0, cut), RowRange(cut, num_rows)
    if rule == "random" and abs(round(1 / fraction) * fraction - 1) > 1e-9:
        # No one in so many: those of the lowest hashes, as many as scikit-learn takes.
        hashes = hash_array(np.arange(num_rows, dtype=np.uint64), key(seed, "validation"))
        order = np.argsort(hashes, kind="stable").astype(np.int64)
        cut = min(math.ceil(num_rows * fraction), num_rows)
        return RowList(np.sort(order[cut:])), RowList(np.sort(order[:cut]))
    if rule == "random":
        period = max(2, round(1 / fraction))
        training, validation = (HashedSplit(num_rows, period, seed, is_validation=flag) for flag in (False, True))
        return training, validation
    if rule == "time":
        return _by_time(table, fraction, time)
    if group is None:
        raise ConfigError(
            "a split by group needs a group key", got="data.split=group", fix="name a column as data.schema.group"
        )
    parts = [np.zeros(0, bool)]
    for columns in _chunks(table):
        keys, _ = columns.keys(group)
        mixed = hash_array(keys.view(np.uint64), key(seed, "validation"))
        parts.append((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction)
    is_held_out = np.concatenate(parts)
    return RowList(np.flatnonzero(~is_held_out)), RowList(np.flatnonzero(is_held_out))


def _by_time(table: ColumnTable, fraction: float, time: str | None) -> tuple[RowSet, RowSet]:
    """The newest share of the rows is kept for evaluation; rows of one time are all on one side of the cut. 24 bytes a
    row while it is found. DataError where a row has no time, or all rows of training would be held out."""
    if time is None:
        fix = "data.time_column=COLUMN, or data.schema.events where rows are events"
        raise ConfigError("a split by time needs a column of times", got="data.split=time", fix=fix)
    times = Times.joined([Times.of(columns, time) for columns in _chunks(table)])
    if (missing := int(np.isnan(times.fraction).sum())) > 0:
        raise DataError(
            f"rows without a time cannot be split by {time!r}",
            got=f"{missing:,} of {len(times):,} rows",
            expected="a number or an ISO 8601 date in every row",
            fix="leave these rows out, or data.split=random",
        )
    boundary = min(len(times) - round(len(times) * fraction), len(times) - 1)
    cut = int(np.lexsort((times.fraction, times.whole))[boundary])
    whole, rest = times.whole[cut], times.fraction[cut]
    is_held_out = (times.whole > whole) | ((times.whole == whole) & (times.fraction >= rest))
    if is_held_out.all():
        raise DataError(
            f"all rows of training would be held out by {time!r}",
            got=f"the time {whole} in the {1 - fraction:.0%} oldest of {len(times):,} rows",
            expected="older rows to train on",
            fix="lower data.eval_fraction, or take another data.split",
        )
    return RowList(np.flatnonzero(~is_held_out)), RowList(np.flatnonzero(is_held_out))


def _chunks(table: ColumnTable) -> Iterator[NamedColumns]:
    for start in range(0, table.num_rows, _CHUNK_ROWS):
        rows = np.arange(start, min(start + _CHUNK_ROWS, table.num_rows))
        yield NamedColumns(table.rows(rows), table.layout)
