"""Columns of a table: how each is parsed, and the arrays of parsed rows.

Legend: n rows, d columns of numbers, k columns of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of

# How a value becomes a 64-bit key: an integer is its own key, a text is hashed.
KeyKind = Literal["text", "integer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """A column of ids or categories."""

    name: str
    kind: KeyKind = "text"
    is_required: bool = False  # a row without a value is a bad row


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A column with any number of ids a row: a list, or a text that `separator` cuts."""

    name: str
    kind: KeyKind = "text"
    separator: str = " "


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelColumn:
    """The column to predict: 0 and 1, or two texts."""

    name: str
    positive: str | None = None  # the text that counts as 1; None: the column holds 0 and 1
    negative: str | None = None  # the text that counts as 0; None: every text that is not `positive`


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnLayout:
    """Which columns of a table are read, and as what. A column may be both a number and a key."""

    numbers: tuple[str, ...] = ()
    keys: tuple[KeyColumn, ...] = ()
    lists: tuple[ListColumn, ...] = ()
    label: LabelColumn | None = None

    @property
    def names(self) -> list[str]:
        """Every column that is read, once."""
        label = [] if self.label is None else [self.label.name]
        named = [*label, *self.numbers, *(key.name for key in self.keys), *(item.name for item in self.lists)]
        return list(dict.fromkeys(named))

    @property
    def fingerprint(self) -> str:
        """A hash of everything that affects reading."""
        return fingerprint_of("layout", self.numbers, self.keys, self.lists, self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListValues:
    """Keys of n rows end to end: row i has values[offsets[i] : offsets[i + 1]]."""

    values: NDArray[np.int64]  # [total]
    offsets: NDArray[np.int64]  # [n + 1], from 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many keys each row has."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.int64]) -> ListValues:
        """The lists of these rows, in this order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) + np.repeat(np.asarray(self.offsets)[rows] - offsets[:-1], lengths)
        return ListValues(values=np.asarray(self.values[positions]), offsets=offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Rows of a table in the order of its layout's columns."""

    numbers: NDArray[np.float64]  # [n, d], NaN where there is none
    keys: NDArray[np.int64]  # [n, k], 0 where there is none
    absent: NDArray[np.bool_]  # [n, k], where there is none
    lists: Mapping[str, ListValues]
    labels: NDArray[np.float32] | None = None  # [n], 0 or 1

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: NDArray[np.int64]) -> Columns:
        """These rows, in this order."""
        return Columns(
            numbers=self.numbers[rows],
            keys=self.keys[rows],
            absent=self.absent[rows],
            lists={name: lists.take(rows) for name, lists in self.lists.items()},
            labels=None if self.labels is None else self.labels[rows],
        )


class NamedColumns:
    """Columns by the names that their layout has for them."""

    def __init__(self, columns: Columns, layout: ColumnLayout) -> None:
        self._columns = columns
        self._layout = layout
        self._numbers = {name: index for index, name in enumerate(layout.numbers)}
        self._keys = {key.name: column for column, key in enumerate(layout.keys)}

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def labels(self) -> NDArray[np.float32] | None:
        """Labels [n], where they were read."""
        return self._columns.labels

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Values [n], NaN where there is none."""
        return np.ascontiguousarray(self._columns.numbers[:, self._numbers[name]])

    def keys(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Keys [n], and where there is none [n]."""
        index = self._keys[name]
        return np.ascontiguousarray(self._columns.keys[:, index]), self._columns.absent[:, index]

    def lists(self, name: str) -> ListValues:
        """Keys of every row."""
        return self._columns.lists[name]

    def take(self, rows: NDArray[np.int64]) -> NamedColumns:
        """These rows, in this order."""
        return NamedColumns(self._columns.take(rows), self._layout)

    def select(self, names: Collection[str]) -> NamedColumns:
        """These columns alone, without labels."""
        old = self._layout
        layout = ColumnLayout(
            numbers=tuple(name for name in old.numbers if name in names),
            keys=tuple(column for column in old.keys if column.name in names),
            lists=tuple(column for column in old.lists if column.name in names),
        )
        keys = [self._keys[column.name] for column in layout.keys]
        columns = Columns(
            numbers=self._columns.numbers[:, [self._numbers[name] for name in layout.numbers]],
            keys=self._columns.keys[:, keys],
            absent=self._columns.absent[:, keys],
            lists={column.name: self._columns.lists[column.name] for column in layout.lists},
        )
        return NamedColumns(columns, layout)

    def replaced(self, rows: NDArray[np.int64], other: NamedColumns, chosen: NDArray[np.int64]) -> NamedColumns:
        """The same, but that `rows` [m] have the columns of `other` from its rows `chosen` [m]."""
        old, new = self._columns, other._columns
        numbers, keys, absent, lists = old.numbers.copy(), old.keys.copy(), old.absent.copy(), dict(old.lists)
        for name, column in other._numbers.items():
            numbers[rows, self._numbers[name]] = new.numbers[chosen, column]
        for name, column in other._keys.items():
            keys[rows, self._keys[name]] = new.keys[chosen, column]
            absent[rows, self._keys[name]] = new.absent[chosen, column]
        sources = np.arange(len(old))
        sources[rows] = len(old) + chosen
        for name, items in new.lists.items():
            lists[name] = _joined([lists[name], items]).take(sources)
        columns = Columns(numbers=numbers, keys=keys, absent=absent, lists=lists, labels=old.labels)
        return NamedColumns(columns, self._layout)


class ColumnTable(Protocol):
    """Rows that can be had in any order."""

    @property
    def layout(self) -> ColumnLayout:
        """The columns of the table."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    @property
    def fingerprint(self) -> str:
        """Equal for tables with equal rows."""

    def rows(self, indices: NDArray[np.int64]) -> Columns:
        """The rows of these numbers, in this order."""


def concatenate(parts: Sequence[Columns]) -> Columns:
    """One after the other. There must be at least one."""
    first = parts[0]
    return Columns(
        numbers=np.concatenate([part.numbers for part in parts]),
        keys=np.concatenate([part.keys for part in parts]),
        absent=np.concatenate([part.absent for part in parts]),
        lists={name: _joined([part.lists[name] for part in parts]) for name in first.lists},
        labels=None
        if first.labels is None
        else np.concatenate([part.labels for part in parts if part.labels is not None]),
    )


def _joined(parts: Sequence[ListValues]) -> ListValues:
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return ListValues(values=np.concatenate([part.values for part in parts]), offsets=offsets)


class InMemoryTable:
    """Rows held in memory."""

    def __init__(self, layout: ColumnLayout, columns: Columns, fingerprint: str) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self._columns = columns

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self._columns)

    def rows(self, indices: NDArray[np.int64]) -> Columns:
        """The rows of these numbers, in this order."""
        return self._columns.take(indices)
