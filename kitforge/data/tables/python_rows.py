"""Rows in memory: an iterable of mappings, possibly endless, or a datasets.Dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, final

from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, Problem
from kitforge.data.tables.cells import READABLE, array_of, pyarrow
from kitforge.data.tables.csv_files import Job
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 1024
# So many rows are looked at for their columns, and to guess what the columns mean.
FIRST_ROWS = 200_000


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
    """Rows with the columns of the first ones; of the first one alone where they come once. Raises DataError without
    rows, and for a row that is not a mapping."""
    head = iter(rows)
    first = next(head, None)
    if not isinstance(first, Mapping):
        got = "no rows" if first is None else type(first).__name__
        raise DataError("these are no rows of a table", got=got, expected="mappings from column to value")
    again = chain([first], head) if head is rows else rows
    return PythonRows(rows=again, names=columns_of_rows([first] if head is rows else rows))


def columns_of_rows(rows: Iterable[object]) -> tuple[str, ...]:
    """The columns of the first rows, in the order in which they come up."""
    found: dict[Any, Any] = {}
    for row in islice(rows, FIRST_ROWS):
        found.update(row if isinstance(row, Mapping) else ())
    names = dict.fromkeys(map(str, found))
    # A column of Arrow has no name with half a pair of surrogates.
    return tuple(name for name in names if name.isascii() or name == name.encode(errors="ignore").decode())


def chunk_of(rows: Sequence[object], start: int, columns: Sequence[str]) -> ArrowChunk:
    """A chunk of these columns; `start` is the number of the first row. A name that a row lacks is a missing value.
    Rows that are not mappings, or hold what no column can, are invalid."""
    good: list[Mapping[Any, Any]] = []
    numbers: list[int] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, start=start + 1):
        if isinstance(row, Mapping):
            good.append(row)
            numbers.append(number)
        else:
            expected = "a mapping from column to value"
            problem = Problem(reason="is not a row", got=type(row).__name__, expected=expected)
            bad.append(BadRow(problem=problem, location=partial(_location, [number], 0)))
    if good and not all(isinstance(name, str) for name in good[0]):
        good = [{str(name): value for name, value in row.items()} for row in good]
    return table_chunk({name: [row.get(name) for row in good] for name in columns}, partial(_location, numbers), bad)


def table_chunk(columns: Mapping[str, Any], location: Callable[[int], str], bad: Sequence[BadRow] = ()) -> ArrowChunk:
    """The chunk of Python values by column. A row with a cell that no column can hold is one more invalid row."""
    arrays: dict[str, Any] = {}
    problems: dict[int, Problem] = {}
    for name, values in columns.items():
        try:
            arrays[name] = array_of(values)
        except (DataError, UnicodeEncodeError):
            found = {row: problem for row, value in enumerate(values) if (problem := _problem(name, value)) is not None}
            arrays[name] = array_of([None if row in found else value for row, value in enumerate(values)])
            problems = found | problems
    table = pyarrow().table(arrays)
    if not problems:
        return ArrowChunk(table=table, location=location, bad=tuple(bad))
    bad = [*bad, *(BadRow(problem=problems[row], location=partial(location, row)) for row in sorted(problems))]
    kept = [row for row in range(table.num_rows) if row not in problems]
    return ArrowChunk(
        table=table.take(pyarrow().array(kept, pyarrow().int64())),
        location=lambda row: location(kept[row]),
        bad=tuple(bad),
    )


def _problem(name: str, value: Any) -> Problem | None:
    """Why no column can hold a cell; None where one can."""
    try:
        array_of([value])
    except UnicodeEncodeError as error:
        expected = "text in UTF-8, without halves of surrogate pairs"
        return Problem(reason=f"holds no text in column {name!r}", got=ascii(error.object)[:60], expected=expected)
    except DataError:
        reason = f"holds a cell that cannot be read in column {name!r}"
        return Problem(reason=reason, got=type(value).__name__, expected=READABLE)
    return None


def _location(numbers: list[int], row: int) -> str:
    return f"row {numbers[row]} of the data"


def _dataset_location(start: int, row: int) -> str:
    return f"the dataset's row {start + row + 1}"
