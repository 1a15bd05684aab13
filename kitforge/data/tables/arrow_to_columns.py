"""From Arrow columns of any type to numbers and 64-bit keys. A row that has a value of the wrong kind is a bad row."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, DecimalMark, Problem
from kitforge.data.tables.cells import (
    UNSURE,
    array_of,
    byte_range,
    decoded,
    is_text,
    lists_of,
    one_array,
    plain_cells,
    pyarrow,
    texts_of,
    with_points,
)
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, KeyKind, LabelColumn, ListColumn, ListValues
from kitforge.data.tables.hashing import hash_texts
from kitforge.foundation.errors import DataError

_LARGEST = 2**63
# Features are float32.
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
_DATE = r"\d{1,4}([./-])\d{1,2}\1\d{2,4}\b"
_BOOLS = {"false": 0, "true": 1}
# Row and its fault.
RowProblem = tuple[int, Problem]


def to_columns(chunk: ArrowChunk, layout: ColumnLayout) -> tuple[Columns, list[BadRow]]:
    """The good rows of a chunk, and the bad ones."""
    table, problem_of = chunk.table, dict[int, Problem]()

    def note(name: str, problems: Iterable[RowProblem]) -> None:
        for row, problem in problems:
            problem_of.setdefault(row, replace(problem, reason=f"{problem.reason} in column {name!r}"))

    # Columns are written one by one, so each lies in one piece.
    numbers = np.empty((table.num_rows, len(layout.numbers)), order="F")
    for index, name in enumerate(layout.numbers):
        numbers[:, index], problems = _numbers(one_array(table.column(name)), name, chunk.decimal)
        note(name, problems)
    keys = np.empty((table.num_rows, len(layout.keys)), np.int64, order="F")
    absent = np.empty(keys.shape, bool, order="F")
    for index, column in enumerate(layout.keys):
        keys[:, index], absent[:, index], problems = _keys(
            one_array(table.column(column.name)), column.kind, column.name
        )
        note(column.name, problems)
        if column.is_required:
            note(column.name, ((int(row), _NO_VALUE) for row in np.flatnonzero(absent[:, index])))
    lists = {}
    for item in layout.lists:
        lists[item.name], problems = _lists(one_array(table.column(item.name)), item)
        note(item.name, problems)
    labels = None
    if layout.label is not None:
        labels, problems = _labels(one_array(table.column(layout.label.name)), layout.label, chunk.decimal)
        note(layout.label.name, problems)
    columns = Columns(numbers=numbers, keys=keys, absent=absent, lists=lists, labels=labels)
    if not problem_of:
        return columns, list(chunk.bad)
    rows = sorted(problem_of)
    good = np.setdiff1d(np.arange(table.num_rows), rows)
    bad = [BadRow(problem=problem_of[row], location=partial(chunk.location, row)) for row in rows]
    return columns.take(good), [*chunk.bad, *bad]


_NO_VALUE = Problem(reason="has no value", got="nothing", expected="a value in every row")


def _numbers(array: Any, name: str, decimal: DecimalMark) -> tuple[NDArray[np.float64], list[RowProblem]]:
    """Values [n], NaN where there is none or no number."""
    arrow, array = pyarrow(), decoded(array)
    types = arrow.types
    if types.is_boolean(array.type):
        array = array.cast(arrow.uint8())
    is_number = types.is_integer(array.type) or types.is_floating(array.type) or types.is_decimal(array.type)
    if not (is_number or types.is_null(array.type) or is_text(array)):
        raise _wrong_type(name, array, "numbers")
    problems: list[RowProblem] = []
    is_ready = decimal == "," and is_text(array)
    if is_ready:
        # Arrow would take a point between thousands for the decimal one.
        array = with_points(plain_cells(array), decimal)
    try:
        values = _floats(array)
    except arrow.ArrowInvalid:
        # The slower way, by which texts with blanks or commas are read.
        array = array if is_ready else with_points(plain_cells(array), decimal)
        try:
            values = _floats(array)
        except arrow.ArrowInvalid:
            values, problems = _one_by_one(array.to_pylist(), _number, np.nan, "holds no number", "a number")
    for row in np.flatnonzero(np.abs(values) > _LARGEST_NUMBER).tolist():
        got = str(array[row])
        if np.isinf(values[row]):
            problem = Problem(
                reason="holds no finite number", got=got, expected="a finite number", fix=_missing_fix(got)
            )
        else:
            expected = f"a number from {-_LARGEST_NUMBER:.3g} to {_LARGEST_NUMBER:.3g}"
            problem = Problem(reason="holds a number beyond float32", got=got, expected=expected, fix=_missing_fix(got))
        problems.append((row, problem))
    return values, problems


def _floats(array: Any) -> NDArray[np.float64]:
    if pyarrow().types.is_decimal(array.type):
        # Arrow rounds twice from decimals, of which 3.01 becomes 3.0100000000000002.
        array = array.cast(pyarrow().string())
    return np.array(array.cast(pyarrow().float64(), safe=False).to_numpy(zero_copy_only=False))


def _number(text: str) -> float:
    """A number, or a bool as one. Python alone would take 1_0 for ten."""
    if text.lower() in _BOOLS:
        return float(_BOOLS[text.lower()])
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _keys(array: Any, kind: KeyKind, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[RowProblem]]:
    """Keys [n], a mask of missing ones [n], and invalid cells."""
    arrow = pyarrow()
    types = arrow.types
    if kind == "text" and types.is_dictionary(array.type) and is_text(array.dictionary):
        # Each different text is hashed once.
        words, nothing, problems = _keys(array.dictionary, kind, name)
        codes = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        absent = array.is_null().to_numpy(zero_copy_only=False)
        if len(words) == 0:
            return np.zeros(len(array), np.int64), absent, problems
        absent = absent | nothing[codes]
        return np.where(absent, 0, words[codes]), absent, problems
    array = plain_cells(array)
    absent = array.is_null().to_numpy(zero_copy_only=False)
    if types.is_null(array.type):
        return np.zeros(len(array), np.int64), absent, []
    if kind == "integer" and (types.is_integer(array.type) or types.is_boolean(array.type)):
        texts = array
    else:
        texts = _texts(array, name)
    if kind == "text":
        return np.where(absent, 0, hash_texts(texts)), absent, []
    try:
        if is_text(texts) and byte_range(texts)[1] > ord("9"):
            # Arrow reads hexadecimal digits too; the slow way says true and false.
            raise arrow.ArrowInvalid
        # No step from text to a smaller type or past the range of int64 is taken in silence.
        integers = texts.cast(arrow.int64())
    except arrow.ArrowInvalid:
        wrong, right = "holds no 64-bit id", f"a whole number from {-_LARGEST} to {_LARGEST - 1}"
        keys, problems = _one_by_one(texts.to_pylist(), _integer, 0, wrong, right)
        return keys.astype(np.int64), absent, problems
    return integers.fill_null(0).to_numpy(zero_copy_only=False), absent, []


def keys_of(values: Sequence[Any], kind: KeyKind) -> NDArray[np.int64]:
    """The keys [n] of Python values, as columns have them. Raises ValueError for one that has none."""
    keys, absent, problems = _keys(array_of(values), kind, "items")
    if problems or absent.any():
        raise ValueError(problems[0][1].got if problems else "no value")
    return keys


def texts_of_column(table: Any, column: KeyColumn | ListColumn) -> tuple[Any, Any]:
    """The different texts of a column as the data have them, in the order of their first rows, and in the form that
    becomes their keys."""
    array = plain_cells(one_array(table.column(column.name)))
    if isinstance(column, ListColumn):
        array = plain_cells(_cut(array, column)[0])
    if pyarrow().types.is_null(array.type):
        array = array.cast(pyarrow().string())
    texts = (array if is_text(array) else _texts(array, column.name)).drop_null().unique()
    return texts, _texts(texts, column.name)


def _texts(array: Any, name: str) -> Any:
    texts = texts_of(array)
    if texts is None:
        raise _wrong_type(name, array, "texts or numbers")
    return texts


def _integer(text: object) -> int:
    number = _BOOLS[str(text)] if text in _BOOLS else int(str(text))
    if "_" in str(text) or not -_LARGEST <= number < _LARGEST:
        raise ValueError(text)
    return number


def _one_by_one(
    values: list[Any], parse: Callable[[Any], Any], nothing: float, reason: str, expected: str
) -> tuple[NDArray[Any], list[RowProblem]]:
    """The slow path, which finds the rows that the fast path failed on."""
    parsed: list[Any] = []
    problems: list[RowProblem] = []
    for row, value in enumerate(values):
        try:
            parsed.append(nothing if value is None else parse(value))
        except ValueError:
            parsed.append(nothing)
            is_id = expected.startswith("a whole")
            fix = "read the column as text (kind: text)" if is_id else _number_fix(str(value))
            problems.append((row, Problem(reason=reason, got=repr(value)[:60], expected=expected, fix=fix)))
    return np.array(parsed, dtype=np.float64 if isinstance(nothing, float) else np.int64), problems


def _number_fix(text: str) -> str:
    if re.match(_DATE, text):
        return "a date is read as ISO 8601 has it (2024-12-31, 2024-12-31T23:59:59Z): rewrite the column"
    return (
        "say what the comma is: data.decimal=',' or data.decimal='.'" if re.match(UNSURE, text) else _missing_fix(text)
    )


def _missing_fix(text: str) -> str:
    """What to do where such a cell is meant to be empty, in quotes that the shell and Hydra take off."""
    words = f'["{text[:60]}"]'
    return f"if it means that there is no value, data.missing_values='{words}', else repair the row"


def _lists(array: Any, column: ListColumn) -> tuple[ListValues, list[RowProblem]]:
    values, lengths = _cut(plain_cells(array), column)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    keys, absent, problems = _keys(values, column.kind, column.name)
    problems += [(int(row), _NO_VALUE) for row in np.flatnonzero(absent)]
    row_problems = [(int(np.searchsorted(offsets, index, side="right")) - 1, problem) for index, problem in problems]
    return ListValues(values=keys, offsets=offsets), row_problems


def _cut(array: Any, column: ListColumn) -> tuple[Any, NDArray[np.int64]]:
    """The items of all lists end to end, and how many each row [n] has."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    types = arrow.types
    if types.is_struct(array.type) and [field.name for field in array.type] == ["list", "text"]:
        # Of rows in Python, some with lists and some with texts.
        texts = plain_cells(array.field("text"))
        array = compute.coalesce(array.field("list"), lists_of(texts), compute.split_pattern(texts, column.separator))
    cut = is_text(array)
    if cut:
        array = compute.coalesce(
            lists_of(array), compute.split_pattern(array, column.separator).cast(arrow.list_(arrow.string()))
        )
    elif array.null_count == len(array):
        array = arrow.nulls(len(array), arrow.list_(arrow.string()))
    if not (types.is_list(array.type) or types.is_large_list(array.type)):
        raise _wrong_type(column.name, array, "lists, or texts with a separator")
    lengths = compute.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = array.flatten()
    if cut:
        # Nothing between two separators is not a value.
        there = compute.greater(compute.binary_length(values), 0)
        rows = np.repeat(np.arange(len(lengths)), lengths)[there.to_numpy(zero_copy_only=False)]
        values, lengths = values.filter(there), np.bincount(rows, minlength=len(lengths)).astype(np.int64)
    return values, lengths


def _labels(array: Any, label: LabelColumn, decimal: DecimalMark) -> tuple[NDArray[np.float32], list[RowProblem]]:
    if label.positive is None:
        values, problems = _numbers(array, label.name, decimal)
        wrong = np.flatnonzero((values != 0) & (values != 1))
        known = {row for row, _ in problems}
        rows = [int(row) for row in wrong if int(row) not in known]
        expected = "0 or 1"
    else:
        array = plain_cells(array)
        array = array.cast(pyarrow().string()) if pyarrow().types.is_null(array.type) else _texts(array, label.name)
        positive, negative = (None if text is None else form_of(text) for text in (label.positive, label.negative))
        is_positive, problems = _equals(array, positive), list[RowProblem]()
        is_negative = _equals(array, negative)
        values, rows = is_positive.astype(np.float64), np.flatnonzero(~(is_positive | is_negative)).tolist()
        expected = f"{label.positive!r} or {'another text' if label.negative is None else repr(label.negative)}"
    for row in rows:
        problems.append((row, Problem(reason="holds no label", got=array[row], expected=expected)))
    return np.nan_to_num(values).astype(np.float32), problems


def form_of(value: Any) -> str:
    """The text of a value of the options in the form of cells: of 5.0 as of 5, of true as of True."""
    return str(_texts(plain_cells(array_of([value])), "label")[0])


def _equals(texts: Any, wanted: str | None) -> NDArray[np.bool_]:
    """Which texts [n] are the one that is wanted; None: which are there at all."""
    equal = pyarrow("pyarrow.compute").equal
    mask = texts.is_valid() if wanted is None else equal(texts, wanted).fill_null(False)
    return np.asarray(mask.to_numpy(zero_copy_only=False))


def _wrong_type(name: str, array: Any, expected: str) -> DataError:
    return DataError(
        f"column {name!r} is of a type that cannot be used so",
        got=str(array.type),
        expected=expected,
        fix="leave the column out of data.schema, or write it as text or numbers",
    )
