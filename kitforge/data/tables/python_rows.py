"""Rows in memory: an iterable of mappings, possibly endless, or a datasets.Dataset."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import chain, islice, product
from typing import Any

from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, Problem
from kitforge.data.tables.cells import READABLE, array_of, pyarrow
from kitforge.data.tables.part import Job, TablePart
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 1024
# So many rows are looked at for their columns, and to guess what the columns mean.
FIRST_ROWS = 200_000


def open_python_rows(rows: Iterable[object]) -> TablePart:
    """Rows with the columns of the first ones; of the first one alone where they come once. Raises DataError without
    rows, and for a row that is not a mapping."""
    head = iter(rows)
    first = next(head, None)
    if not isinstance(first, Mapping):
        got = "no rows" if first is None else type(first).__name__
        raise DataError("these are no rows of a table", got=got, expected="mappings from column to value")
    names = columns_of_rows([first] if head is rows else rows)
    again = chain([first], head) if head is rows else rows
    return TablePart(name="the data", find_names=lambda: names, chunks=partial(_chunks, again))


def _chunks(rows: Iterable[object], columns: tuple[str, ...], known: frozenset[str]) -> Iterator[Job]:
    rows, start = iter(rows), 0
    while part := list(islice(rows, _CHUNK_ROWS)):
        yield partial(chunk_of, part, start, columns, known)
        start += len(part)


def open_dataset(dataset: Any) -> TablePart:
    """The rows of a datasets.Dataset."""
    names = tuple(dataset.column_names)
    return TablePart(name="the dataset", find_names=lambda: names, chunks=partial(_dataset_chunks, dataset))


def _dataset_chunks(dataset: Any, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
    start = 0
    for table in dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_CHUNK_ROWS):
        location = partial(lambda first, row: f"the dataset's row {first + row + 1}", start)
        yield partial(ArrowChunk, table=table, location=location)
        start += table.num_rows


def columns_of_rows(rows: Iterable[object]) -> tuple[str, ...]:
    """The columns of the first rows, in the order in which they come up."""
    found: dict[Any, Any] = {}
    for row in islice(rows, FIRST_ROWS):
        found.update(row if isinstance(row, Mapping) else ())
    names = dict.fromkeys(map(str, found))
    # A column of Arrow has no name with half a pair of surrogates.
    return tuple(name for name in names if name.isascii() or name == name.encode(errors="ignore").decode())


def chunk_of(
    rows: Sequence[object], start: int, columns: Sequence[str], known: frozenset[str] = frozenset()
) -> ArrowChunk:
    """`mappings_chunk` of rows whose names may be of any type; `start` is the number of the first row."""
    if not all(isinstance(name, str) for name in next((row for row in rows if isinstance(row, Mapping)), ())):
        rows = [{str(name): row[name] for name in row} if isinstance(row, Mapping) else row for row in rows]
    return mappings_chunk(list(enumerate(rows, start + 1)), columns, known, lambda at: f"row {at} of the data", "a row")


def mappings_chunk(
    rows: Sequence[tuple[int, Any]], columns: Sequence[str], known: frozenset[str], at: Callable[[int], str], what: str
) -> ArrowChunk:
    """A chunk of numbered rows. A name that a row lacks is a missing value. Rows that are not mappings, hold what no
    column can, or misspell a known name are invalid."""
    shapes = {frozenset(row) for _, row in rows if isinstance(row, Mapping)} if known else ()
    slips = {shape: slip for shape in shapes if (slip := _misspelled(shape, shapes, columns, known)) is not None}
    problem_of: dict[int, Problem] = {}
    for number, row in rows:
        if not isinstance(row, Mapping):
            got = str(row) if isinstance(row, Exception) else type(row).__name__
            problem_of[number] = Problem(reason=f"is not {what}", got=got[:80], expected='{"column": value, ...}')
        elif slips and (slip := slips.get(frozenset(row))) is not None:
            problem_of[number] = slip
    good = [(number, row) for number, row in rows if number not in problem_of]
    bad = [BadRow(problem=problem, location=partial(at, number)) for number, problem in problem_of.items()]
    return table_chunk(
        {name: [row.get(name) for _, row in good] for name in columns}, lambda row: at(good[row][0]), bad
    )


def _misspelled(
    shape: frozenset[str], shapes: Collection[frozenset[str]], columns: Sequence[str], known: frozenset[str]
) -> Problem | None:
    """What a row of these names misspells: it lacks a known name, and has one that is nearly it or none that is known.
    A name that stands beside it in another row is a column of its own."""
    strange, is_bare = frozenset(map(str, shape - known)), not shape & known
    for name, other in product((name for name in columns if name in known - shape), strange):
        partners = known if is_bare else {name}
        if (is_bare or _is_nearly(name, other)) and not any(other in each and each & partners for each in shapes):
            got, expected = ", ".join(sorted(strange))[:80], f"a column {name!r}, null where there is no value"
            return Problem(reason=f"has no column {name!r}", got=f"columns {got}", expected=expected)
    return None


@lru_cache(maxsize=4096)
def _is_nearly(one: str, other: str) -> bool:
    """Whether a name may be a slip for another. Names with other digits are those of a series, as x_1 and x_2."""
    digits = [list(filter(str.isdigit, name)) for name in (one, other)]
    return digits[0] == digits[1] and SequenceMatcher(None, one.lower(), other.lower()).ratio() >= 0.8


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
