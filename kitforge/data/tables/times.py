"""Columns of dates and times as seconds since 1970, so that rows can be put in order of time."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kitforge.data.tables.bad_rows import ArrowChunk
from kitforge.data.tables.cells import pyarrow
from kitforge.data.tables.csv_files import Job

_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"


def as_times(job: Job, times: tuple[str, ...]) -> ArrowChunk:
    """The chunk with these columns as numbers, where they hold dates: of Arrow's types, or ISO 8601 texts. Numbers
    stay, and so do texts that are neither, which are bad rows where numbers are read."""
    chunk = job()
    table = chunk.table
    for index, name in enumerate(table.column_names):
        if name in times:
            table = table.set_column(index, name, _seconds(table.column(name)))
    return replace(chunk, table=table)


def _second(text: str | None) -> str | None:
    """One date as the text of a number, or the text unchanged: the slow path, which keeps only bad cells."""
    if text is None or re.match(_NUMBER, text):
        return text
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return text
    return repr((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp())


def _seconds(column: Any) -> Any:
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    types = arrow.types
    if types.is_string(column.type) or types.is_large_string(column.type):
        is_number = compute.match_substring_regex(column, _NUMBER)
        if compute.all(is_number, skip_nulls=True).as_py() is not False:
            return column
        try:
            column = compute.cast(column, arrow.timestamp("us"))
        except arrow.ArrowInvalid:
            return arrow.chunked_array([[_second(text) for text in column.to_pylist()]], arrow.string())
    if types.is_date(column.type):
        column = compute.cast(column, arrow.timestamp("us"))
    if not types.is_timestamp(column.type):
        return column
    unit = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[column.type.unit]
    return compute.divide(compute.cast(compute.cast(column, arrow.int64()), arrow.float64(), safe=False), unit)
