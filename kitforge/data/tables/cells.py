"""Cells in one form: a value is the same text, number and whole number in every container, whatever stands beside it.

Blanks around a text are no part of it. An empty text, NaN, NaT and NA are no value. As a text, a bool is `true` or
`false`, and a whole number has digits alone (12, not 12.0), so a csv file, a Parquet file, JSON and a DataFrame agree.
Texts that only look alike keep their forms: 007, 1.10, 12e3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.optional_imports import import_optional
from kitforge.data.tables.bad_rows import ArrowChunk, DecimalMark
from kitforge.data.tables.hashing import text_views

_SMALLEST, _LARGEST = -(2.0**63), 2.0**63
_WHOLE = r"^(-?(?:0|[1-9]\d*))\.0+$"
# As Python and pandas write large floats. A hexadecimal hash such as 0012e345 has no sign.
_EXPONENT = r"^-?\d(\.\d+)?e\+\d{2}$"
_NOTHING = ("NAType", "NaTType")  # of pandas
_BOOLEAN = r"(?i)^(true|false)$"
_DECIMAL_COMMA = r"^([+-]?\d*),(\d+)$"
_GROUPED_COMMA = r"^[+-]?[1-9]\d{0,2}((\.\d{3})+),\d+$"
_GROUPS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$"
_SURE_GROUPS = r"^[+-]?[1-9]\d{0,2}((,\d{3}){2,}(\.\d+)?|,\d{3}\.\d+)$"
_UNSURE = r"^[+-]?[1-9]\d{0,2},\d{3}$"


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its modules."""
    return import_optional(module, needed_for="reading tables", extra="recommender")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CellRules:
    """How cells are read, in every container."""

    missing_values: tuple[str, ...] = ()  # texts that mean a missing value, besides an empty one
    decimal: DecimalMark = "auto"  # the decimal mark of numbers written as text

    def apply(self, chunk: ArrowChunk) -> ArrowChunk:
        """The chunk without a value where a cell holds one of the missing values, as a text or as a number."""
        table = chunk.table
        for index, name in enumerate(table.column_names) if self.missing_values else ():
            column = table.column(name)
            is_missing = self._is_missing(column)
            if is_missing is not None and pyarrow("pyarrow.compute").any(is_missing).as_py():
                column = pyarrow("pyarrow.compute").if_else(is_missing, None, decoded(column))
                table = table.set_column(index, name, column)
        return replace(chunk, table=table, decimal=self.decimal)

    def _is_missing(self, column: Any) -> Any:
        """Where a column holds a missing value; None for a type that texts have no form of."""
        arrow, compute, types = pyarrow(), pyarrow("pyarrow.compute"), pyarrow().types
        column = one_array(decoded(column))
        if is_text(column):
            column = _one_form(_trimmed(column))
        elif not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
            return None
        forms = _one_form(_trimmed(arrow.array(self.missing_values)))
        return compute.is_in(texts_of(column), value_set=forms.cast(column.type if is_text(column) else arrow.string()))


def array_of(values: Sequence[Any]) -> Any:
    """A column of Python values as an Arrow array. Values of several types, or beyond int64, become texts. Lists beside
    texts become structs of a list and a text, of which one is null."""
    arrow = pyarrow()
    kinds = {_kind(value) for value in values} - {None} if isinstance(values, (list, tuple)) else set()
    if len(kinds) < 2:
        if any(type(value).__name__ == "Timestamp" and value.nanosecond for value in values):
            # Arrow would read timestamps of pandas as microseconds.
            zone = next((str(value.tz) for value in values if getattr(value, "tz", None) is not None), None)
            nanoseconds = [None if _kind(value) is None else value.value for value in values]
            return arrow.array(nanoseconds, arrow.int64()).cast(arrow.timestamp("ns", zone))
        try:
            return arrow.array(values, from_pandas=True)
        except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError, OverflowError, TypeError):
            pass
    is_list = [isinstance(value, (list, tuple, set, np.ndarray)) for value in values]
    if not any(is_list):
        return arrow.array([text_of(value) for value in values], arrow.string())
    lists = [list(map(text_of, value)) if flag else None for value, flag in zip(values, is_list, strict=True)]
    texts = [None if flag else text_of(value) for value, flag in zip(values, is_list, strict=True)]
    array = arrow.array(lists, arrow.list_(arrow.string()))
    if not any(text is not None for text in texts):
        return array
    return arrow.StructArray.from_arrays([array, arrow.array(texts, arrow.string())], ["list", "text"])


def _kind(value: Any) -> type | None:
    """The type of a cell; int for every number, which Arrow joins exactly or not at all; None where it is no value."""
    kind = type(value)
    if value is None or kind.__name__ in _NOTHING:
        return None
    if kind is float or issubclass(kind, np.floating):
        return None if math.isnan(value) else int
    return int if issubclass(kind, np.integer) else bool if kind is np.bool_ else kind


def text_of(value: Any) -> str | None:
    """A Python value as text; None where it is no value."""
    value = value.item() if isinstance(value, np.generic) else value
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan or type(value).__name__ in _NOTHING:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST:
        return str(int(value))
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    return value.isoformat() if isinstance(value, (date, time)) else str(value)


def one_array(column: Any) -> Any:
    """A chunked column as one Arrow array."""
    column = column.combine_chunks()
    return column if hasattr(column, "buffers") else pyarrow().concat_arrays(column.chunks)


def join_tables(tables: Sequence[Any]) -> Any:
    """Tables of the same columns, one after the other. A column whose type changes along the tables gets the type that
    all of its values have as rows in Python: floats for whole numbers and floats, else texts."""
    arrow = pyarrow()
    names = tables[0].column_names
    columns = [_join_columns([table.column(name) for table in tables]) for name in names]
    return arrow.Table.from_arrays(columns, names)


def _join_columns(columns: Sequence[Any]) -> Any:
    arrow = pyarrow()
    kinds = {column.type for column in columns if not arrow.types.is_null(column.type)}
    kind = next(iter(kinds), arrow.null())
    if len(kinds) < 2:
        parts = [part.cast(kind) for column in columns for part in column.chunks]
        return arrow.chunked_array(parts, kind)
    return array_of([value for column in columns for value in column.to_pylist()])


def is_text(array: Any) -> bool:
    """Whether an array holds texts."""
    types = pyarrow().types
    return bool(types.is_string(array.type) or types.is_large_string(array.type))


def plain(array: Any) -> Any:
    """A decoded array, with texts without blanks around them, and null where there is no value."""
    array = decoded(array)
    if is_text(array):
        return _trimmed(array)
    if pyarrow().types.is_floating(array.type):
        is_nan = pyarrow("pyarrow.compute").is_nan(array).fill_null(False)
        return pyarrow("pyarrow.compute").if_else(is_nan, None, array)
    return array


def decoded(array: Any) -> Any:
    """An array without dictionary, view or extension type; bytes as text."""
    arrow, types = pyarrow(), pyarrow().types
    if isinstance(array.type, arrow.BaseExtensionType):
        array = array.cast(array.type.storage_type)
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if types.is_run_end_encoded(array.type):
        array = pyarrow("pyarrow.compute").run_end_decode(array)
    is_bytes = types.is_binary(array.type) or types.is_large_binary(array.type) or types.is_binary_view(array.type)
    if types.is_string_view(array.type) or is_bytes:
        array = array.cast(arrow.large_string())
    if types.is_fixed_size_list(array.type) or types.is_list_view(array.type):
        array = array.cast(arrow.list_(array.type.value_type))
    return array.cast(arrow.float32()) if types.is_float16(array.type) else array


def _trimmed(texts: Any) -> Any:
    compute = pyarrow("pyarrow.compute")
    lengths, first, last = _edges(texts, 0, -1)
    # The blanks of Unicode begin with one of these bytes and end in one above 127.
    if ((lengths > 0) & ((first <= 32) | (last <= 32) | ((first >= 0xC2) & (first <= 0xE3) & (last >= 128)))).any():
        texts = compute.utf8_trim_whitespace(texts)
        lengths = _edges(texts)[0]
    if (lengths == 0).any():
        texts = compute.if_else(compute.equal(compute.binary_length(texts), 0), None, texts)
    return texts


def _edges(texts: Any, *positions: int) -> list[NDArray[Any]]:
    """The lengths in bytes of texts [n], and their bytes at positions from the start or, negative ones, from the end;
    any byte where a text is too short."""
    offsets, data = text_views(texts)
    starts, ends = offsets[:-1], offsets[1:]
    bytes_of = [data.take((ends if position < 0 else starts) + position, mode="clip") for position in positions]
    return [ends - starts, *bytes_of]


def texts_of(array: Any) -> Any | None:
    """The texts of a plain array of texts, bools or numbers [n]; None for another type."""
    arrow, types = pyarrow(), pyarrow().types
    if is_text(array):
        return _one_form(array)
    if types.is_integer(array.type) or types.is_boolean(array.type):
        return array.cast(arrow.string())
    if types.is_decimal(array.type):
        return arrow.array(map(text_of, array.to_pylist()), arrow.string())
    return _texts_of_floats(array) if types.is_floating(array.type) else None


def _texts_of_floats(array: Any) -> Any:
    arrow = pyarrow()
    values, absent = array.to_numpy(zero_copy_only=False), array.is_null().to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        is_whole = (values == np.floor(values)) & (values >= _SMALLEST) & (values < _LARGEST)
        whole = arrow.array(np.where(is_whole, values, 0).astype(np.int64), mask=absent).cast(arrow.string())
    if (is_whole | absent).all():
        return whole
    # numpy writes the shortest digits that give the value again, as Python, pandas and JSON do.
    others = arrow.array(values.astype(str).tolist(), arrow.string(), mask=absent)
    return pyarrow("pyarrow.compute").if_else(arrow.array(is_whole), whole, others)


def _one_form(texts: Any) -> Any:
    """Texts [n] with bools and whole numbers in the form that they have in columns of these types."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    lengths, first, last, third = _edges(texts, 0, -1, -3)
    is_candidate = (last | 32 == ord("e")) & ((first | 32 == ord("t")) | (first | 32 == ord("f"))) & (lengths <= 5)
    is_candidate |= (third == ord("+")) & (first <= ord("9"))
    is_candidate[_with_zeros(texts, np.flatnonzero((last == ord("0")) & (first <= ord("9"))))] = True
    rows = np.flatnonzero(is_candidate)
    if not len(rows):
        return texts
    chosen = texts.take(arrow.array(rows))
    forms = compute.replace_substring_regex(chosen, _WHOLE, r"\1")
    forms = compute.if_else(compute.equal(forms, "-0"), "0", forms)
    forms = compute.if_else(compute.match_substring_regex(chosen, _BOOLEAN), compute.utf8_lower(chosen), forms)
    is_large = compute.match_substring_regex(chosen, _EXPONENT)
    if compute.any(is_large).as_py():
        texts_and_flags = zip(chosen.to_pylist(), is_large.to_pylist(), strict=True)
        large = [text_of(float(text)) if flag else None for text, flag in texts_and_flags]
        forms = compute.if_else(is_large, arrow.array(large, chosen.type), forms)
    if forms.equals(chosen):
        return texts
    mask = np.zeros(len(texts), bool)
    mask[rows] = True
    return compute.replace_with_mask(texts, arrow.array(mask), forms)


def _with_zeros(texts: Any, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows [m] of texts whose zeros at the end come after a point."""
    offsets, data = text_views(texts)
    ends, found = offsets[1:][rows] - 1, [rows[:0]]
    while len(rows):
        ends = ends - 1
        bytes_before = data.take(ends, mode="clip")
        found.append(rows[bytes_before == ord(".")])
        goes_on = (bytes_before == ord("0")) & (ends > offsets[:-1][rows])
        rows, ends = rows[goes_on], ends[goes_on]
    return np.concatenate(found)


def with_points(texts: Any, decimal: DecimalMark) -> Any:
    """Texts of numbers with a decimal point. Commas stay where a cell does not show what they mean: in 1,250."""
    compute = pyarrow("pyarrow.compute")
    if not compute.any(compute.match_substring(texts, ",")).as_py():
        return texts
    no_groups = compute.replace_substring(texts, ",", "")
    if decimal == ".":
        return compute.if_else(compute.match_substring_regex(texts, _GROUPS), no_groups, texts)
    decimals = compute.replace_substring_regex(texts, _DECIMAL_COMMA, r"\1.\2")
    grouped = compute.replace_substring(compute.replace_substring(texts, ".", ""), ",", ".")
    decimals = compute.if_else(compute.match_substring_regex(texts, _GROUPED_COMMA), grouped, decimals)
    if decimal == ",":
        return decimals
    decimals = compute.if_else(compute.match_substring_regex(texts, _SURE_GROUPS), no_groups, decimals)
    return compute.if_else(compute.match_substring_regex(texts, _UNSURE), texts, decimals)


def is_unsure(text: str) -> bool:
    """Whether the comma of a number may separate decimals or thousands."""
    return re.match(_UNSURE, text) is not None
