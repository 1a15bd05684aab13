"""Rows in memory: an iterable of mappings, possibly endless, or a datasets.Dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, final

from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, Problem
from kitforge.data.tables.cells import array_of, pyarrow
from kitforge.data.tables.csv_files import Job
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 1024


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PythonRows:
    """Mappings from column to value. An iterator is read once and on demand."""

    rows: Iterable[object]
    names: tuple[str, ...]
    name: str = "the data"  # for messages

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks in order."""
        rows, start = iter(self.rows), 0
        while part := list(islice(rows, _CHUNK_ROWS)):
            yield partial(chunk_of, part, start, columns)
            start += len(part)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HFDatasetTable:
    """The rows of a datasets.Dataset."""

    dataset: Any
    names: tuple[str, ...]
    name: str = "the dataset"  # for messages

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks in order."""
        start = 0
        for table in self.dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
            yield partial(ArrowChunk, table=table, location=partial(_dataset_location, start))
            start += table.num_rows


def open_python_rows(rows: Iterable[object]) -> PythonRows:
    """Rows with the columns of the first one. Raises DataError without rows, and for a row that is not a mapping."""
    head = iter(rows)
    first = next(head, None)
    if not isinstance(first, Mapping):
        got = "no rows" if first is None else type(first).__name__
        raise DataError("these are no rows of a table", got=got, expected="mappings from column to value")
    again = chain([first], head) if head is rows else rows
    return PythonRows(rows=again, names=tuple(map(str, first)))


def chunk_of(rows: Sequence[object], start: int, columns: Sequence[str]) -> ArrowChunk:
    """A chunk of these columns; `start` is the number of the first row. Rows that are not mappings are invalid."""
    good: list[Mapping[str, Any]] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, start=start + 1):
        problem = _problem(row, columns)
        if problem is None:
            assert isinstance(row, Mapping)
            good.append(row)
            numbers.append(number)
        else:
            bad.append(BadRow(problem=problem, location=partial(_location, [number], 0)))
    arrow = pyarrow()
    table = arrow.table({name: array_of([row[name] for row in good]) for name in columns})
    return ArrowChunk(table=table, location=partial(_location, numbers), bad=tuple(bad))


def _problem(row: object, columns: Sequence[str]) -> Problem | None:
    if not isinstance(row, Mapping):
        return Problem(reason="is not a row", got=type(row).__name__, expected="a mapping from column to value")
    missing = [name for name in columns if name not in row]
    if missing:
        return Problem(
            reason=f"has no column {missing[0]!r}",
            got=f"columns {', '.join(map(str, row))}",
            expected=f"a column {missing[0]!r}, None where there is no value",
        )
    return None


def _location(numbers: list[int], row: int) -> str:
    return f"row {numbers[row]} of the data"


def _dataset_location(start: int, row: int) -> str:
    return f"the dataset's row {start + row + 1}"
