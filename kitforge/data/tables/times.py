"""Columns of dates and times as seconds since 1970, so that rows can be put in order of time.

A float64 of seconds has no nanoseconds, and none of the last digits of a long counter. So the order has two columns of
its own: whole seconds as int64, and the fraction of a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.tables.bad_rows import ArrowChunk
from kitforge.data.tables.cells import is_text, one_array, plain_cells, pyarrow
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, NamedColumns

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_PLAIN_NUMBER = r"^(-?\d+)(\.\d+)?$"
_ZONE = r"\s*(UTC|GMT|Z)$"
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_WHOLE, _FRACTION = " (whole)", " (fraction)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of rows, in an order that nothing is rounded for."""

    whole: NDArray[np.int64]  # [n]
    fraction: NDArray[np.float64]  # [n]; NaN where a row has no time

    @classmethod
    def empty(cls) -> Times:
        """Of no rows."""
        return cls(whole=np.zeros(0, np.int64), fraction=np.zeros(0))

    @classmethod
    def of(cls, columns: NamedColumns, name: str) -> Times:
        """The times of rows that were read with `with_times`."""
        keys, absent = columns.keys(name + _WHOLE)
        return cls(whole=keys, fraction=np.where(absent, np.nan, columns.numbers(name + _FRACTION)))

    @classmethod
    def joined(cls, parts: Sequence[Times]) -> Times:
        """One after the other."""
        return cls(
            whole=np.concatenate([part.whole for part in parts]),
            fraction=np.concatenate([part.fraction for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.whole)

    def take(self, rows: NDArray[Any]) -> Times:
        """These rows, by their numbers or a mask."""
        return Times(whole=self.whole[rows], fraction=self.fraction[rows])


def with_times(layout: ColumnLayout, name: str) -> ColumnLayout:
    """The layout with the seconds of a column of times, and their order."""
    numbers = dict.fromkeys((*layout.numbers, name + _FRACTION, name))
    return replace(layout, numbers=tuple(numbers), keys=(*layout.keys, KeyColumn(name=name + _WHOLE, kind="integer")))


def without_order(columns: Sequence[str], times: Sequence[str]) -> list[str]:
    """The columns that a source has of those of a layout `with_times`."""
    added = {time + suffix for time in times for suffix in (_WHOLE, _FRACTION)}
    return [name for name in columns if name not in added]


def as_times(chunk: ArrowChunk, times: Sequence[str]) -> ArrowChunk:
    """The chunk with these columns as numbers, where they hold dates: of Arrow's types, or ISO 8601 texts; and with the
    columns of their order. Numbers stay, and so do texts that are neither: bad rows, where numbers are read."""
    table = chunk.table
    for index, name in enumerate(table.column_names):
        if name in times:
            seconds, whole, fraction = _seconds(one_array(table.column(name)))
            table = table.set_column(index, name, seconds)
            table = table.append_column(name + _WHOLE, whole).append_column(name + _FRACTION, fraction)
    return replace(chunk, table=table)


def _seconds(column: Any) -> tuple[Any, Any, Any]:
    """Seconds as numbers or texts of numbers, their whole part, and their fraction."""
    arrow, compute, column = pyarrow(), pyarrow("pyarrow.compute"), plain_cells(column)
    types = arrow.types
    if is_text(column):
        is_number = compute.match_substring_regex(column, _NUMBER)
        if compute.all(is_number, skip_nulls=True).as_py() is not False:
            return (column, *_parts_of_texts(column))
        try:
            column = compute.cast(compute.replace_substring_regex(column, _ZONE, ""), arrow.timestamp("ns"))
        except arrow.ArrowInvalid:
            texts = arrow.array([_second(text) for text in column.to_pylist()], arrow.string())
            return (texts, *_parts_of_texts(texts))
    if types.is_date(column.type):
        column = compute.cast(column, arrow.timestamp("s"))
    if types.is_timestamp(column.type):
        unit, absent = _UNITS[column.type.unit], column.is_null().to_numpy(zero_copy_only=False)
        counts = compute.cast(column, arrow.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        whole, rest = np.divmod(counts, unit)
        values = arrow.array(whole + rest / unit, mask=absent)
        return values, arrow.array(whole, mask=absent), arrow.array(rest / unit, mask=absent)
    if types.is_integer(column.type) and not types.is_uint64(column.type):
        return column, column.cast(arrow.int64()), arrow.array(np.zeros(len(column)))
    if types.is_floating(column.type):
        floats = column.cast(arrow.float64()).to_numpy(zero_copy_only=False)
        absent = np.isnan(floats)
        whole, rest = _split(np.where(absent, 0, floats))
        return column, arrow.array(whole, mask=absent), arrow.array(rest, mask=absent)
    texts = column.cast(arrow.string()) if types.is_uint64(column.type) or types.is_decimal(column.type) else None
    nothing = arrow.nulls(len(column), arrow.string())
    return (column, *_parts_of_texts(nothing if texts is None else texts))


def _second(text: str | None) -> str | None:
    """One date as the text of a number, or the text unchanged: the slow path, which keeps only bad cells."""
    if text is None or re.match(_NUMBER, text):
        return text
    iso_text = re.sub(_ZONE, "+00:00", text)
    # Python knows microseconds only.
    digits = re.search(r"\.(\d+)", iso_text)
    nanoseconds = f"{digits[1]:0<9}"[:9] if digits else "0" * 9
    try:
        date = datetime.fromisoformat(iso_text.replace(digits[0], "", 1) if digits else iso_text)
    except ValueError:
        return text
    whole = int((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())
    # Before 1970 the fraction counts towards zero.
    return str(Decimal(f"{whole}.{nanoseconds}") if whole >= 0 else whole + Decimal(f"0.{nanoseconds}"))


def _parts_of_texts(texts: Any) -> tuple[Any, Any]:
    """The whole part and the fraction of texts of numbers; nothing where a text is none."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    is_plain = compute.fill_null(compute.match_substring_regex(texts, r"^\d{1,18}(\.\d+)?$"), False)
    if compute.all(is_plain).as_py():
        whole = compute.replace_substring_regex(texts, r"\..*$", "").cast(arrow.int64())
        fraction = compute.replace_substring_regex(texts, r"^\d+", "0").cast(arrow.float64())
        return whole, fraction
    parts = [_part_of_text(text) for text in texts.to_pylist()]
    absent = np.array([part is None for part in parts])
    whole = arrow.array([None if part is None else part[0] for part in parts], arrow.int64())
    return whole, arrow.array([0.0 if part is None else part[1] for part in parts], arrow.float64(), mask=absent)


def _part_of_text(text: str | None) -> tuple[int, float] | None:
    if text is None:
        return None
    found = re.match(_PLAIN_NUMBER, text)
    if found and abs(int(found[1])) < 2**63:
        whole_number = math.floor(Decimal(text))
        return whole_number, float(Decimal(text) - whole_number)
    try:
        value = float(text)
    except ValueError:
        return None
    whole, fraction = _split(np.array([value]))
    return int(whole[0]), float(fraction[0])


def _split(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Whole parts [n] and fractions [n]. Beyond int64 the fraction is the value, whose order is kept so."""
    is_inside = np.abs(values) < 2.0**63
    floors = np.floor(np.where(is_inside, values, 0))
    ends = np.where(values > 0, np.iinfo(np.int64).max, np.iinfo(np.int64).min)
    return np.where(is_inside, floors.astype(np.int64), ends), np.where(is_inside, values - floors, values)
