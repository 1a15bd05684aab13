"""Tables in memory by columns: DataFrames of pandas or polars, other tables of Arrow, and arrays by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from kitforge.data.tables.bad_rows import ArrowChunk, check_names
from kitforge.data.tables.cells import array_of, pyarrow
from kitforge.data.tables.csv_files import Job
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 65_536


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRows:
    """The rows of an Arrow table."""

    table: Any
    names: tuple[str, ...]
    name: str = "the data"  # for messages

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks in order."""
        chosen = self.table.select(list(columns))
        for start in range(0, self.table.num_rows, _CHUNK_ROWS):
            yield partial(ArrowChunk, table=chosen.slice(start, _CHUNK_ROWS), location=partial(_location, start))


def is_frame(spec: object) -> bool:
    """Whether it gives its columns as Arrow arrays (the Arrow PyCapsule interface): pandas, polars and others do."""
    return hasattr(spec, "__arrow_c_stream__")


def open_frame(spec: Any) -> FrameRows:
    """The table of a DataFrame, or of arrays by column. Raises DataError for other objects."""
    arrow = pyarrow()
    try:
        if isinstance(spec, Mapping):
            scalars = [
                str(name) for name, values in spec.items() if isinstance(values, str) or not hasattr(values, "__len__")
            ]
            if scalars:
                raise DataError(
                    "this is one row, or a mapping of something else than columns",
                    got=f"a single value for {', '.join(scalars[:8])}",
                    expected="arrays by column, all of one length; or a list of rows",
                )
            spec = {str(name): array_of(values) for name, values in spec.items()}
        if hasattr(spec, "dtypes"):
            check_names("the data", list(map(str, spec.columns)))
        table = _table(spec)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError) as error:
        raise DataError(
            "these columns are no table", got=error, expected="one type a column, and one length for all"
        ) from error
    # pandas hands over an index that has values of its own as one more column.
    names = tuple(name for name in table.column_names if not name.startswith("__index_level_"))
    check_names("the data", table.column_names)
    if table.num_rows == 0:
        raise DataError("there are no rows in the data", got=f"columns {', '.join(names)}", expected="at least one row")
    return FrameRows(table=table, names=names)


def _table(spec: Any) -> Any:
    """The table of an object. Columns of Python objects of pandas are read cell by cell, as rows in Python are."""
    arrow = pyarrow()
    if not (hasattr(spec, "items") and any(map(_holds_objects, getattr(spec, "dtypes", ())))):
        return arrow.table(spec)
    names, columns = zip(*spec.items(), strict=True)
    arrays = [
        array_of(column.tolist()) if _holds_objects(column.dtype) else arrow.array(column, from_pandas=True)
        for column in columns
    ]
    return arrow.Table.from_arrays(arrays, list(map(str, names)))


def _holds_objects(dtype: Any) -> bool:
    categories = getattr(dtype, "categories", None)
    return str(dtype if categories is None else categories.dtype) == "object"


def _location(start: int, row: int) -> str:
    return f"row {start + row + 1} of the data"
