"""Tables in memory by columns: DataFrames of pandas or polars, other tables of Arrow, and arrays by name."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kitforge.data.tables.bad_rows import ArrowChunk, check_names
from kitforge.data.tables.cells import contents, pyarrow
from kitforge.data.tables.part import Job, TablePart
from kitforge.data.tables.python_rows import table_chunk
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 65_536


def open_frame(spec: Any) -> TablePart:
    """The table of a DataFrame, or of arrays by column. Raises DataError for other objects."""
    arrow, columns = pyarrow(), None
    try:
        if isinstance(spec, Mapping):
            scalars = [
                str(name)
                for name, values in spec.items()
                if isinstance(values, str) or not hasattr(contents(values), "__len__")
            ]
            if scalars:
                raise DataError(
                    "this is one row, or a mapping of something else than columns",
                    got=f"a single value for {', '.join(scalars[:8])}",
                    expected="arrays by column, all of one length; or a list of rows",
                )
            columns = {str(name): values for name, values in spec.items()}
        elif hasattr(spec, "index") and (
            any(map(_holds_objects, spec.dtypes))
            # Arrow leaves out a named index that pandas keeps as a range.
            or (type(spec.index).__name__ == "RangeIndex" and spec.index.name is not None)
        ):
            columns = _columns_of_pandas(spec)
        elif hasattr(spec, "dtypes"):
            check_names("the data", list(map(str, spec.columns)))
        if columns is None:
            rows = ArrowChunk(table=arrow.table(spec), location=_location)
        else:
            rows = table_chunk(columns, _location)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError) as error:
        raise DataError(
            "these columns are no table", got=error, expected="one type a column, and one length for all"
        ) from error
    names = tuple(rows.table.column_names)
    check_names("the data", names)
    if rows.table.num_rows == 0 and not rows.bad:
        raise DataError("there are no rows in the data", got=f"columns {', '.join(names)}", expected="at least one row")
    return TablePart(name="the data", find_names=lambda: names, chunks=partial(_chunks, rows))


def _chunks(rows: ArrowChunk, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
    chosen = rows.table.select(list(columns))
    for start in range(0, max(chosen.num_rows, 1), _CHUNK_ROWS):
        location, bad = partial(lambda first, row: rows.location(first + row), start), () if start else rows.bad
        yield partial(ArrowChunk, table=chosen.slice(start, _CHUNK_ROWS), location=location, bad=bad)


def _columns_of_pandas(frame: Any) -> dict[str, Any]:
    """The columns, and the levels of the index that have names, as Arrow has them. Columns of Python objects are read
    cell by cell, as rows in Python are."""
    levels = [(name, frame.index.get_level_values(level)) for level, name in enumerate(frame.index.names)]
    columns = [*frame.items(), *((name, values) for name, values in levels if name is not None)]
    check_names("the data", [str(name) for name, _ in columns])
    return {
        str(name): values.tolist() if _holds_objects(values.dtype) else pyarrow().array(values, from_pandas=True)
        for name, values in columns
    }


def _holds_objects(dtype: Any) -> bool:
    categories = getattr(dtype, "categories", None)
    return str(dtype if categories is None else categories.dtype) == "object"


def _location(row: int) -> str:
    return f"row {row + 1} of the data"
