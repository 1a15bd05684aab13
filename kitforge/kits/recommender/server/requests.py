"""Request bodies with rows: validation, conversion to features, and their JSON Schema."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import Problem
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import NamedColumns
from kitforge.data.tables.python_rows import chunk_of
from kitforge.foundation.errors import DataError, nearest
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.request_body import MAX_SHOWN_CHARACTERS, invalid_value, parse_body, truncate
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.features import FeatureEncoder

_TYPES = {"integer": ["integer", "null"], "text": ["string", "integer", "null"]}


class RowReader:
    """Converts the rows of a body to features. Rows need the columns `wanted`; other columns of the schema are empty.
    `ignored` columns may be present and are not read."""

    def __init__(
        self,
        encoder: FeatureEncoder,
        wanted: Collection[str],
        ignored: Collection[str],
        max_rows: int,
        cells: CellRules,
    ) -> None:
        self._encoder = encoder
        self._cells = cells
        self._layout = encoder.schema.layout(with_label=False)
        self._wanted = [name for name in self._layout.names if name in wanted]
        self._known = {*self._wanted, *ignored}
        self._max_rows = max_rows
        self._lists = {column.name for column in self._layout.lists}

    def read(self, fields: Mapping[str, Any]) -> FeatureBatch:
        """The features of `rows` or `columns`. Raises ApiError that names the cell."""
        rows = self._rows(fields)
        if not 0 < len(rows) <= self._max_rows:
            what = f"{len(rows)} rows" if rows else "no rows"
            raise _refused("rows", "the request has no rows" if not rows else "the request has too many rows", what,
                           f"1 to {self._max_rows} rows (serve.max_rows)")  # fmt: skip
        for number, row in enumerate(rows):
            self._check(number, row)
        others = dict.fromkeys(name for name in self._layout.names if name not in self._wanted)
        chunk = chunk_of([{**others, **row} for row in rows], 0, self._layout.names)
        try:
            chunk = self._cells.apply(dataclasses.replace(chunk, location=lambda row: f"rows[{row}]"))
            columns, bad = to_columns(chunk, self._layout)
        except DataError as error:
            raise ApiError(400, str(error), parameter="rows", code="invalid_value") from None
        if bad:
            raise _of_problem(bad[0].location(), bad[0].problem)
        try:
            return self._encoder.encode(NamedColumns(columns, self._layout))
        except DataError as error:
            raise ApiError(400, str(error), parameter="rows", code="invalid_value") from None

    def schema(self) -> dict[str, Any]:
        """The rows as JSON Schema: the properties of a body, one of which is required."""
        cells = {name: self._cell(name) for name in self._wanted}
        row = {"type": "object", "required": self._wanted, "properties": cells}
        columns = {name: {"type": "array", "items": cell} for name, cell in cells.items()}
        size = {"minItems": 1, "maxItems": self._max_rows}
        return {
            "rows": {"description": "An object for each row.", "type": "array", "items": row, **size},
            "columns": {
                "description": "In place of `rows`: a list of values for each column, all of one length.",
                "type": "object",
                "required": self._wanted,
                "properties": columns,
            },
        }

    def _rows(self, fields: Mapping[str, Any]) -> Sequence[Any]:
        given = [name for name in ("rows", "columns") if fields.get(name) is not None]
        if len(given) != 1:
            got = "both" if given else "neither"
            raise _refused("rows", "the request needs rows", got, "either 'rows' or 'columns'")
        if given == ["rows"]:
            if not isinstance(fields["rows"], list):
                raise invalid_value("rows", fields["rows"], "a list of objects")
            rows: Sequence[Any] = fields["rows"]
            return rows
        columns = fields["columns"]
        if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
            raise invalid_value("columns", columns, "an object with a list for each column")
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            got = truncate(", ".join(f"{name}: {length}" for name, length in lengths.items()))
            raise _refused("columns", "the columns are of different lengths", got, "one value for each row")
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]

    def _check(self, number: int, row: Any) -> None:
        if not isinstance(row, dict):
            raise invalid_value(f"rows[{number}]", row, "an object with a value for each column")
        for name in row:
            if name not in self._known:
                shown = truncate(name)
                got, do = f"a column {shown!r}", nearest(shown, self._known)
                expected = f"columns {', '.join(self._wanted)}"
                raise _refused(f"rows[{number}]", f"rows[{number}] has an unknown column", got, expected, do)
        for name in self._wanted:
            if name not in row:
                got = truncate(", ".join(row)) or "no columns"
                problem = f"rows[{number}] has no column {name!r}"
                raise _refused(f"rows[{number}].{name}", problem, got, "the column, null where there is no value")
            self._check_cell(f"rows[{number}].{name}", row[name], is_list=name in self._lists)

    def _check_cell(self, location: str, value: Any, *, is_list: bool) -> None:
        if not is_list:
            if isinstance(value, (list, dict)):
                raise invalid_value(location, value, "one value")
            return
        # A text is split at the column's separator; a list of mixed types would be read as text.
        kinds = {type(each) for each in value} if isinstance(value, list) else set()
        if isinstance(value, (dict, bool, int, float)) or len(kinds) > 1 or not kinds <= {int, str}:
            raise invalid_value(location, value, "a list of whole numbers or a list of texts")

    def _cell(self, name: str) -> dict[str, Any]:
        if name in self._layout.numbers:
            return {"type": ["number", "null"]}
        for column in self._layout.lists:
            if column.name == name:
                items = {"type": "integer"} if column.kind == "integer" else {"type": "string"}
                return {"type": ["array", "null"], "items": items}
        column_of = {column.name: column for column in self._layout.keys}
        types = _TYPES[column_of[name].kind]
        return {"type": types[:-1] if column_of[name].is_required else types}


def known_fields(body: bytes, known: Sequence[str]) -> dict[str, Any]:
    """The fields of a body, all of them known. Raises ApiError."""
    fields: dict[str, Any] = parse_body(body)
    for name in fields:
        if name not in known:
            shown = truncate(name)
            problem = f"unknown parameter {shown!r}"
            raise ApiError(400, f"{problem}\n  do:       {nearest(shown, known)}", parameter=shown,
                               code="unknown_parameter")  # fmt: skip
    return fields


def whole_number(fields: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """A field from 1 to `most`. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise invalid_value(name, value, f"a whole number from 1 to {most}")
    return value


def _of_problem(location: str, problem: Problem) -> ApiError:
    got = str(problem.got)[:MAX_SHOWN_CHARACTERS]
    return _refused(
        location, f"{location} {problem.reason}", got, problem.expected, "mend the row; no row was answered"
    )


def _refused(name: str, problem: str, got: str, expected: str, do: str | None = None) -> ApiError:
    message = f"{problem}\n  got:      {got}\n  expected: {expected}"
    return ApiError(400, message + (f"\n  do:       {do}" if do else ""), parameter=name, code="invalid_value")
