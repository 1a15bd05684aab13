"""Cells in one form: a value is the same text, number and whole number in every container, whatever stands beside it.

Blanks around a text are no part of it. An empty text, NaN, NaT and NA are no value. As a text, a bool is `true` or
`false`, and a whole number has digits alone (12, not 12.0), so a csv file, a Parquet file, JSON and a DataFrame agree.
Texts that only look alike keep their forms: 007, 1.10, 12e3.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.optional_imports import import_optional
from kitforge.data.tables.bad_rows import ArrowChunk, DecimalMark
from kitforge.data.tables.hashing import text_views
from kitforge.foundation.errors import DataError

_SMALLEST, _LARGEST = -(2.0**63), 2.0**63
_WHOLE = r"^(-?(?:0|[1-9]\d*))\.0+$"
# As Python and pandas write large floats, and Decimal and Arrow small and large decimals. A hexadecimal hash such as
# 0012e345 has no sign.
_EXPONENT = r"-?\d(\.\d+)?(e\+\d{2}|E\+\d+|E-([7-9]|[1-9]\d+))"
# Of one of these types, values need no look at each.
_PLAIN = {str, bool, bytes, list, dict}
_NOTHING = ("NAType", "NaTType")  # of pandas
_BARE = r"[+-]?[\d.]+(?:[eE][+-]?\d+)?|None|null|[Nn]a[Nn]|[Tt]rue|[Ff]alse"
_ITEM = re.compile(rf"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?:{_BARE})(?![^\s,\]])""")
_LIST = re.compile(rf"""\[\s*(?:(?:{_ITEM.pattern})(?:\s*,\s*|\s+|(?=\s*\])))*\]""")
_NO_TEXT: Any = object.__str__
_WITH_TEXT = (int, float, list, tuple, set, frozenset)
READABLE = "a text, a number, a bool, a date, None, or a list or an array of these"
_TRUE, _FALS = (int.from_bytes(word, "little") for word in (b"true", b"fals"))
_DECIMAL_COMMA = r"^([+-]?\d*),(\d+(?:[eE][+-]?\d+)?)$"
_GROUPED_COMMA = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+,\d+$"
_GROUPED_POINTS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?$"
_GROUPS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$"
_SURE_GROUPS = r"^[+-]?[1-9]\d{0,2}((,\d{3}){2,}(\.\d+)?|,\d{3}\.\d+)$"
# The comma of such a number may separate decimals or thousands.
UNSURE = r"^[+-]?[1-9]\d{0,2},\d{3}$"


def pyarrow(module: str = "pyarrow") -> Any:
    """pyarrow or one of its modules."""
    return import_optional(module, needed_for="reading tables", extra="recommender")


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
            column = decoded(one_array(column))
            is_missing = self._is_missing(column)
            if is_missing is not None and pyarrow("pyarrow.compute").any(is_missing).as_py():
                column = pyarrow("pyarrow.compute").if_else(is_missing, None, column)
                table = table.set_column(index, name, column)
        return replace(chunk, table=table, decimal=self.decimal)

    def _is_missing(self, column: Any) -> Any:
        """Where a column holds a missing value; None for a type that texts have no form of."""
        arrow, compute, types = pyarrow(), pyarrow("pyarrow.compute"), pyarrow().types
        if is_text(column):
            column = _one_form(_trimmed(column))
        elif not (types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)):
            return None
        forms = _one_form(_trimmed(arrow.array(self.missing_values)))
        return compute.is_in(texts_of(column), value_set=forms.cast(column.type if is_text(column) else arrow.string()))


def array_of(values: Sequence[Any]) -> Any:
    """A column of Python values as an Arrow array. Values of several types, or beyond int64, become texts. Lists beside
    texts become structs of a list and a text, of which one is null. Raises DataError for a value of a type that has no
    text, UnicodeEncodeError for a text that has no UTF-8."""
    arrow = pyarrow()
    if isinstance(values, (arrow.Array, arrow.ChunkedArray)):
        return values
    values = contents(values)
    is_sequence = isinstance(values, (list, tuple))
    types = set(map(type, values)) - {type(None)} if is_sequence else set()
    is_plain = len(types) > 0 and (types <= {int, float} or (len(types) == 1 and types <= _PLAIN))
    if not is_plain and is_sequence:
        values = [contents(value) for value in values]
        narrow = {type(value) for value in values if isinstance(value, (np.float32, np.float16))}
        if narrow and {type(value) for value in values if isinstance(value, (float, np.floating))} != narrow:
            # Floats of several widths are written in the shortest digits of their own: 0.1 is one value.
            values = [_widened(value) if type(value) in narrow else value for value in values]
    kinds = {_kind(value) for value in values} - {None} if is_sequence and not is_plain else set()
    if kinds == {Decimal}:
        # Arrow would give all of them the most places of any.
        kinds = {value.as_tuple().exponent for value in values if _kind(value) is not None}
    if len(kinds) < 2:
        if not is_plain and any(type(value).__name__ == "Timestamp" and value.nanosecond for value in values):
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


def contents(value: Any) -> Any:
    """The numbers of a tensor or an array in the types of numpy or Python, of a scalar alone; others as they are."""
    if type(value) in _PLAIN or isinstance(value, np.generic) or type(value).__module__.startswith("pandas"):
        return value
    if not (hasattr(value, "__array__") and hasattr(value, "tolist") and hasattr(value, "ndim")):
        return value.as_py() if hasattr(value, "as_py") else value
    # Of torch: wherever it lies, and whether it has gradients.
    value = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        array = np.asarray(value)
    except TypeError:
        # A type that numpy lacks, such as bfloat16.
        return value.tolist()
    return array[()] if array.ndim == 0 else array


def _widened(value: Any) -> float:
    """A narrow float as the one of Python that is written so; a whole number is itself."""
    return float(value) if float(value).is_integer() or not math.isfinite(value) else float(str(value))


def _kind(value: Any) -> type | None:
    """The type of a cell; int for every number, which Arrow joins exactly or not at all; None if not a value."""
    kind = type(value)
    if value is None or kind.__name__ in _NOTHING:
        return None
    if kind is float or issubclass(kind, np.floating):
        return None if math.isnan(value) else int
    return int if issubclass(kind, np.integer) else bool if kind is np.bool_ else kind


def text_of(value: Any) -> str | None:
    """A Python value as text; None where it is not a value. Raises DataError for a type that has none."""
    value = contents(value)
    if isinstance(value, np.generic):
        value = _widened(value) if isinstance(value, np.floating) else value.item()
    is_nan = isinstance(value, (float, Decimal)) and math.isnan(value)
    if value is None or is_nan or type(value).__name__ in _NOTHING:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST:
        return str(int(value))
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, Decimal):
        # As a csv file has it: 1.10 keeps its form.
        return str(int(value)) if value.is_finite() and value == value.to_integral_value() else f"{value:f}"
    if type(value).__str__ is _NO_TEXT and not isinstance(value, _WITH_TEXT):
        # Only its repr is left, which nobody means.
        raise DataError("a cell is of a type that cannot be read", got=type(value).__name__, expected=READABLE)
    return value.isoformat() if isinstance(value, (date, time)) else str(value)


def lists_of(texts: Any) -> Any:
    """The lists [n] that texts show as JSON, Python and numpy write them: [1, 2], ['a', 'b'], ["a"]; null where a text
    shows none."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    if not compute.any(compute.starts_with(texts, "[")).as_py():
        return arrow.nulls(len(texts), arrow.list_(arrow.string()))
    return arrow.array(map(_list_of, texts.to_pylist()), arrow.list_(arrow.string()))


def _list_of(text: str | None) -> list[str | None] | None:
    if text is None or not _LIST.fullmatch(text):
        return None
    try:
        return [_item(token) for token in _ITEM.findall(text[1:-1])]
    except (SyntaxError, ValueError):
        return None


def _item(token: str) -> str | None:
    if token[0] in "'\"":
        # Both are literals of Python, and JSON's are of the second kind.
        return str(json.loads(token) if token[0] == '"' else ast.literal_eval(token))
    return None if token[0] in "Nn" else token


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


def plain_cells(array: Any) -> Any:
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
        # Arrow casts no dictionary of text views, which polars has.
        array = decoded(array.dictionary).take(array.indices)
    if types.is_run_end_encoded(array.type):
        array = pyarrow("pyarrow.compute").run_end_decode(array)
    is_bytes = types.is_binary(array.type) or types.is_large_binary(array.type) or types.is_binary_view(array.type)
    if types.is_string_view(array.type) or is_bytes:
        try:
            array = array.cast(arrow.large_string())
        except arrow.ArrowInvalid:
            # Bytes that are no UTF-8.
            array = arrow.array(map(text_of, array.to_pylist()), arrow.large_string())
    if types.is_fixed_size_list(array.type):
        array = array.cast(arrow.list_(array.type.value_type))
    if types.is_list_view(array.type) or types.is_large_list_view(array.type):
        # Arrow's own cast of a view gives wrong offsets.
        lengths = pyarrow("pyarrow.compute").list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = arrow.array(np.append(0, np.cumsum(lengths, dtype=np.int64)))
        array = arrow.LargeListArray.from_arrays(offsets, array.flatten(), mask=array.is_null())
    return array.cast(arrow.float32()) if types.is_float16(array.type) else array


def _trimmed(texts: Any) -> Any:
    compute = pyarrow("pyarrow.compute")
    lowest, highest = byte_range(texts)
    if (lowest <= ord(" ") or highest >= 0xC2) and _has_outer_blanks(texts):
        texts = compute.utf8_trim_whitespace(texts)
    offsets = text_views(texts)[0]
    is_empty = offsets[1:] == offsets[:-1]
    # A null has no bytes either.
    has_empty = np.count_nonzero(is_empty) > texts.null_count
    if has_empty or (texts.null_count and (is_empty & texts.is_valid().to_numpy(zero_copy_only=False)).any()):
        texts = compute.if_else(compute.equal(compute.binary_length(texts), 0), None, texts)
    return texts


def byte_range(texts: Any) -> tuple[int, int]:
    """The lowest and the highest byte of texts; a pass over bytes costs a tenth of one over texts."""
    used = _bytes_of(texts)
    return (int(used.min()), int(used.max())) if len(used) else (255, 0)


def _bytes_of(texts: Any) -> NDArray[np.uint8]:
    offsets, data = text_views(texts)
    return data[offsets[0] : offsets[-1]]


def _has_outer_blanks(texts: Any) -> bool:
    """Whether texts may begin or end in a blank."""
    offsets, data = text_views(texts)
    positions = offsets.astype(np.intp)
    first, last = data.take(positions[:-1], mode="clip"), data.take(positions[1:] - 1, mode="clip")
    if min(first.min(initial=255), last.min(initial=255)) <= ord(" "):
        return True
    # The blanks of Unicode begin with one of the first bytes, and end in one of the others.
    may_begin = (first == 0xC2) | ((first >= 0xE1) & (first <= 0xE3))
    rows = np.flatnonzero(may_begin | ((last >= 0x80) & (last <= 0xAF)))
    chosen = texts.take(pyarrow().array(rows))
    return not pyarrow("pyarrow.compute").utf8_trim_whitespace(chosen).equals(chosen)


def texts_of(array: Any) -> Any | None:
    """The texts of a plain array of texts, bools or numbers [n]; None for another type."""
    arrow, types = pyarrow(), pyarrow().types
    if is_text(array):
        return _one_form(array)
    if types.is_integer(array.type) or types.is_boolean(array.type):
        return array.cast(arrow.string())
    if types.is_decimal(array.type):
        return _one_form(array.cast(arrow.string()))
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
    digits = values.astype(str) if values.dtype == np.float64 else values.astype(str).astype(np.float64).astype(str)
    others = arrow.array(digits.tolist(), arrow.string(), mask=absent)
    return pyarrow("pyarrow.compute").if_else(arrow.array(is_whole), whole, others)


def _one_form(texts: Any) -> Any:
    """Texts [n] with bools and whole numbers in the form that they have in columns of these types."""
    lowest, highest = byte_range(texts)
    if highest > ord("9"):
        texts = _replaced(texts, _with_bools(texts), pyarrow("pyarrow.compute").utf8_lower)
    if lowest <= ord("."):
        texts = _replaced(texts, _with_zeros(texts), _without_zeros)
        texts = _replaced(texts, _with_exponents(texts), _without_exponents)
    return texts


def _replaced(texts: Any, rows: NDArray[np.intp], form: Callable[[Any], Any]) -> Any:
    """Texts [n] with another form of the rows [m]. Each different text gets its form once."""
    if not len(rows):
        return texts
    mask = np.zeros(len(texts), bool)
    mask[rows] = True
    chosen = texts.filter(pyarrow().array(mask)).dictionary_encode()
    forms = form(chosen.dictionary)
    if forms.equals(chosen.dictionary):
        return texts
    return pyarrow("pyarrow.compute").replace_with_mask(texts, pyarrow().array(mask), forms.take(chosen.indices))


def _without_zeros(texts: Any) -> Any:
    compute = pyarrow("pyarrow.compute")
    forms = compute.replace_substring_regex(texts, _WHOLE, r"\1")
    return compute.if_else(compute.equal(forms, "-0"), "0", forms)


def _without_exponents(texts: Any) -> Any:
    is_number = (re.fullmatch(_EXPONENT, text) for text in texts.to_pylist())
    forms = [
        text_of((float if "e" in text else Decimal)(text)) if flag else text
        for text, flag in zip(texts.to_pylist(), is_number, strict=True)
    ]
    return pyarrow().array(forms, texts.type)


def _with_bools(texts: Any) -> NDArray[np.intp]:
    """The rows [m] of texts that are true or false in any case."""
    offsets, data = text_views(texts)
    lengths = np.diff(offsets)
    rows = np.flatnonzero((lengths == 4) | (lengths == 5))
    if not len(rows):
        return rows
    # Every byte begins a word of four.
    words: NDArray[np.uint32] = np.ndarray((len(data) - 3,), dtype="<u4", buffer=data, strides=(1,))
    heads, ends = words[offsets[:-1][rows]] | 0x20202020, data[offsets[1:][rows] - 1] | 0x20
    is_true = (heads == _TRUE) & (lengths[rows] == 4)
    is_false = (heads == _FALS) & (lengths[rows] == 5) & (ends == ord("e"))
    return rows.compress(is_true | is_false)


def _with_exponents(texts: Any) -> NDArray[np.intp]:
    """The rows [m] of texts that may be numbers with an exponent."""
    used = _bytes_of(texts)
    if not ((used[:-1] | 0x20 == ord("e")) & ((used[1:] == ord("+")) | (used[1:] == ord("-")))).any():
        return np.empty(0, np.intp)
    offsets, data = text_views(texts)
    positions = offsets.astype(np.intp)
    first, ends = data.take(positions[:-1], mode="clip"), positions[1:]
    is_signed = np.isin([data.take(ends - 2, mode="clip"), data.take(ends - 3, mode="clip")], (ord("+"), ord("-")))
    return np.flatnonzero(is_signed.any(0) & (first <= ord("9")))


def _with_zeros(texts: Any) -> NDArray[np.intp]:
    """The rows [m] of texts that may be numbers with nothing but zeros after a point."""
    found = [np.empty(0, np.intp)]
    if not (_bytes_of(texts) == ord(".")).any():
        return found[0]
    offsets, data = text_views(texts)
    positions = offsets.astype(np.intp)
    first, last = data.take(positions[:-1], mode="clip"), data.take(positions[1:] - 1, mode="clip")
    rows = np.flatnonzero((last == ord("0")) & (first <= ord("9")))
    ends = positions[1:][rows] - 1
    while len(rows):
        ends = ends - 1
        bytes_before = data.take(ends, mode="clip")
        found.append(rows[bytes_before == ord(".")])
        goes_on = (bytes_before == ord("0")) & (ends > positions[:-1][rows])
        rows, ends = rows[goes_on], ends[goes_on]
    return np.concatenate(found)


def with_points(texts: Any, decimal: DecimalMark) -> Any:
    """Texts of numbers with a decimal point, and nothing between thousands. Commas stay where a cell does not show what
    they mean: in 1,250."""
    compute = pyarrow("pyarrow.compute")
    if decimal == ",":
        grouped = compute.replace_substring(texts, ".", "")
        texts = compute.if_else(compute.match_substring_regex(texts, _GROUPED_POINTS), grouped, texts)
        return compute.replace_substring_regex(texts, _DECIMAL_COMMA, r"\1.\2")
    if not compute.any(compute.match_substring(texts, ",")).as_py():
        return texts
    no_groups = compute.replace_substring(texts, ",", "")
    if decimal == ".":
        return compute.if_else(compute.match_substring_regex(texts, _GROUPS), no_groups, texts)
    decimals = compute.replace_substring_regex(texts, _DECIMAL_COMMA, r"\1.\2")
    grouped = compute.replace_substring(compute.replace_substring(texts, ".", ""), ",", ".")
    decimals = compute.if_else(compute.match_substring_regex(texts, _GROUPED_COMMA), grouped, decimals)
    decimals = compute.if_else(compute.match_substring_regex(texts, _SURE_GROUPS), no_groups, decimals)
    return compute.if_else(compute.match_substring_regex(texts, UNSURE), texts, decimals)
