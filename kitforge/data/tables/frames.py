"""Tables in memory by columns: DataFrames of pandas or polars, other tables of Arrow, and arrays by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from kitforge.data.tables.arrow_to_columns import pyarrow
from kitforge.data.tables.bad_rows import ArrowChunk
from kitforge.data.tables.csv_files import Job
from kitforge.foundation.errors import DataError

_CHUNK_ROWS = 65_536


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRows:
    """The rows of an Arrow table."""

    table: Any
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return "the data"

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
            spec = {str(name): arrow.array(values) for name, values in spec.items()}
        table = arrow.table(spec)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError, arrow.ArrowNotImplementedError) as error:
        raise DataError(
            "these columns are no table", got=error, expected="one type a column, and one length for all"
        ) from error
    # pandas hands over an index that has values of its own as one more column.
    names = tuple(name for name in table.column_names if not name.startswith("__index_level_"))
    for index, column in enumerate(table.columns):
        kind = column.type.value_type if arrow.types.is_dictionary(column.type) else column.type
        if arrow.types.is_string_view(kind):
            # The form in which polars hands over texts, for which Arrow lacks most functions.
            table = table.set_column(index, table.column_names[index], column.cast(arrow.large_string()))
    if table.num_rows == 0:
        raise DataError("there are no rows in the data", got=f"columns {', '.join(names)}", expected="at least one row")
    return FrameRows(table=table, names=names)


def as_missing(job: Job, missing_values: tuple[str, ...]) -> ArrowChunk:
    """The chunk, without a value where a cell holds one of these texts."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    chunk, types = job(), arrow.types
    table = chunk.table
    for index, name in enumerate(table.column_names):
        column = table.column(name)
        if not (types.is_string(column.type) or types.is_large_string(column.type)):
            continue
        is_missing = compute.is_in(column, value_set=arrow.array(missing_values, column.type))
        if compute.any(is_missing).as_py():
            table = table.set_column(index, name, compute.if_else(is_missing, None, column))
    return replace(chunk, table=table)


def _location(start: int, row: int) -> str:
    return f"row {start + row + 1} of the data"
