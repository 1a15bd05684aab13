"""Request bodies with rows: validation, conversion to features, and their JSON Schema."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import NamedColumns
from kitforge.data.tables.python_rows import chunk_of
from kitforge.foundation.errors import DataError, nearest
from kitforge.inference.server.errors import refused
from kitforge.inference.server.request_body import MAX_SHOWN_CHARACTERS, invalid_value, parse_body, truncate
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.features import FeatureEncoder


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
            got, amount = (f"{len(rows)} rows", "too many") if rows else ("no rows", "no")
            expected = f"1 to {self._max_rows} rows (serve.max_rows)"
            raise refused("rows", f"the request has {amount} rows", got=got, expected=expected)
        for number, row in enumerate(rows):
            self._check(number, row)
        others = dict.fromkeys(name for name in self._layout.names if name not in self._wanted)
        chunk = chunk_of([{**others, **row} for row in rows], 0, self._layout.names)
        try:
            chunk = self._cells.apply(dataclasses.replace(chunk, location=lambda row: f"rows[{row}]"))
            columns, bad = to_columns(chunk, self._layout)
        except DataError as error:
            raise refused("rows", str(error)) from None
        if bad:
            location, problem = bad[0].location(), bad[0].problem
            got, fix = str(problem.got)[:MAX_SHOWN_CHARACTERS], "mend the row; no row was answered"
            raise refused(location, f"{location} {problem.reason}", got=got, expected=problem.expected, fix=fix)
        try:
            return self._encoder.encode(NamedColumns(columns, self._layout))
        except DataError as error:
            raise refused("rows", str(error)) from None

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
            raise refused("rows", "the request needs rows", got=got, expected="either 'rows' or 'columns'")
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
            problem = "the columns are of different lengths"
            raise refused("columns", problem, got=got, expected="one value for each row")
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]

    def _check(self, number: int, row: Any) -> None:
        if not isinstance(row, dict):
            raise invalid_value(f"rows[{number}]", row, "an object with a value for each column")
        for name in row:
            if name not in self._known:
                shown = truncate(name)
                got, fix = f"a column {shown!r}", nearest(shown, self._known)
                expected = f"columns {', '.join(self._wanted)}"
                row_name = f"rows[{number}]"
                raise refused(row_name, f"{row_name} has an unknown column", got=got, expected=expected, fix=fix)
        for name in self._wanted:
            if name not in row:
                got = truncate(", ".join(row)) or "no columns"
                problem = f"rows[{number}] has no column {name!r}"
                expected = "the column, null where there is no value"
                raise refused(f"rows[{number}].{name}", problem, got=got, expected=expected)
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
        types = {"integer": ["integer", "null"], "text": ["string", "integer", "null"]}[column_of[name].kind]
        return {"type": types[:-1] if column_of[name].is_required else types}


def known_fields(body: bytes, known: Sequence[str]) -> dict[str, Any]:
    """The fields of a body, all of them known. Raises ApiError."""
    fields: dict[str, Any] = parse_body(body)
    for name in fields:
        if name not in known:
            shown = truncate(name)
            raise refused(shown, f"unknown parameter {shown!r}", "unknown_parameter", fix=nearest(shown, known))
    return fields


def whole_number(fields: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """A field from 1 to `most`. Raises ApiError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise invalid_value(name, value, f"a whole number from 1 to {most}")
    return value
