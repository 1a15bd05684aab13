"""Batch inference: a file of rows to a file with scores or retrieved items, in input order.

Rows are processed in blocks, so memory does not grow with the file. The output appears when it is complete.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from kitforge.data.features import python_rows
from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import join_tables, pyarrow, text_of
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, NamedColumns
from kitforge.data.tables.reader import blocks
from kitforge.data.tables.source import TableSource
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import atomic_file
from kitforge.foundation.progress import Advance
from kitforge.kits.recommender.pipeline import ROWS_AT_ONCE, RecommendationPipeline

SUFFIXES = (".csv", ".jsonl", ".parquet")


def write_predictions(pipeline: RecommendationPipeline, source: TableSource, target: Path, progress: Advance) -> None:
    """Write `target` atomically. Bad rows raise DataError or are skipped (data.on_invalid); skipped rows are not in the
    output."""
    options = pipeline.options.predict
    kept = source.names if options.columns is None else options.columns
    added = ("items", "scores") if pipeline.is_retrieval else ("score",)
    if taken := [name for name in added if name in kept]:
        fix = "name the columns to keep: predict.columns=[...], or rename these"
        raise DataError("the input has columns that predictions would overwrite", got=", ".join(taken), fix=fix)
    writer: _ParquetWriter | _TextWriter | None = None
    suffix = target.suffix.lower()
    kinds = _column_types(source, tuple(kept)) if suffix == ".parquet" else {}
    done, bad = 0, BadRows(policy=pipeline.options.data.on_invalid)
    with atomic_file(target) as file:
        for rows, predictions in _predicted(pipeline, source, tuple(kept), bad):
            for name, values in zip(added, predictions, strict=True):
                rows = rows.append_column(name, values)
            if writer is None:
                is_text = suffix != ".parquet"
                writer = _TextWriter(file, suffix) if is_text else _ParquetWriter(file, kinds, rows.schema)
            writer.write_table(rows)
            done += rows.num_rows
            progress(done)
        source.check_unchanged()
        if writer is None:
            raise DataError(f"there are no rows in {source.name}", got="no rows", expected="at least one")
        writer.close()
    bad.log_summary(source.name, done)


def _predicted(
    pipeline: RecommendationPipeline, source: TableSource, kept: tuple[str, ...], bad: BadRows
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The kept columns of each block of rows, and the predictions."""
    arrow = pyarrow()
    encoder, wanted = pipeline.user_encoder() if pipeline.is_retrieval else (pipeline.encoder, None)
    layout = encoder.schema.layout(with_label=False)
    columns = layout.names if wanted is None else [name for name in layout.names if name in wanted]
    waiting: list[Any] = []
    for block in blocks(_good_rows(source, (layout, columns), kept, bad, waiting.append), ROWS_AT_ONCE):
        table = join_tables(waiting)
        rows, waiting[:] = table.slice(0, len(block)), [table.slice(len(block))]
        batch = encoder.encode(NamedColumns(block, layout))
        if not pipeline.is_retrieval:
            yield rows, (arrow.array(pipeline.scores(batch).cpu().numpy()),)
            continue
        predictions = pipeline.items(batch, pipeline.options.predict.top_k)
        items = arrow.array([[item["item"] for item in row] for row in predictions])
        scores = [[item["score"] for item in row] for row in predictions]
        yield rows, (items, arrow.array(scores, arrow.list_(arrow.float32())))


def _good_rows(
    source: TableSource,
    read: tuple[ColumnLayout, list[str]],
    kept: tuple[str, ...],
    bad: BadRows,
    keep: Callable[[Any], None],
) -> Iterator[Columns]:
    """The good rows of each chunk, after their kept columns are passed to `keep`. Columns of the layout that are not
    read are empty."""
    arrow, (layout, columns) = pyarrow(), read
    # Longer than every column name, so it is unique.
    number = f"number of {' '.join(source.names)}"
    numbered = dataclasses.replace(layout, keys=(*layout.keys, KeyColumn(name=number, kind="integer")))
    for job in source.jobs(tuple(dict.fromkeys((*columns, *kept)))):
        chunk = job()
        table = chunk.table.append_column(number, arrow.array(np.arange(chunk.table.num_rows)))
        for name in layout.names:
            if name not in columns:
                table = table.drop_columns([name]) if name in table.column_names else table
                table = table.append_column(name, arrow.nulls(table.num_rows))
        parsed, problems = to_columns(dataclasses.replace(chunk, table=table), numbered)
        bad.handle(problems)
        keep(chunk.table.select(list(kept)).take(parsed.keys[:, -1]))
        yield dataclasses.replace(parsed, keys=parsed.keys[:, :-1], absent=parsed.absent[:, :-1])


def _column_types(source: TableSource, kept: tuple[str, ...]) -> dict[str, Any]:
    """The types of the kept columns over all rows, since a file of Parquet has one for each. Whole numbers and floats
    become floats, other types that differ become texts."""
    kinds: dict[str, Any] = dict.fromkeys(kept, pyarrow().null())
    for job in source.jobs(kept):
        schema = job().table.schema
        kinds = {name: _joint_type(kind, schema.field(name).type) for name, kind in kinds.items()}
    return kinds


def _joint_type(one: Any, other: Any) -> Any:
    arrow, types = pyarrow(), pyarrow().types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_list(one) and types.is_list(other):
        return arrow.list_(_joint_type(one.value_type, other.value_type))
    are_numbers = all(types.is_integer(kind) or types.is_floating(kind) for kind in (one, other))
    return arrow.float64() if are_numbers else arrow.string()


def _as_type(column: Any, kind: Any) -> Any:
    """A column as another type that all of its values have."""
    if column.type == kind:
        return column
    arrow = pyarrow()
    try:
        return column.cast(kind)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError):
        if not arrow.types.is_string(kind):
            raise
    return arrow.chunked_array([[_text(value) for value in column.to_pylist()]], kind)


def _text(value: Any) -> str | None:
    return _json(value) if isinstance(value, (list, dict)) else text_of(value)


class _ParquetWriter:
    """Writes Parquet, with one type for each column."""

    def __init__(self, file: IO[bytes], kinds: Mapping[str, Any], schema: Any) -> None:
        arrow = pyarrow()
        self._schema = arrow.schema([field.with_type(kinds.get(field.name, field.type)) for field in schema])
        self._writer = pyarrow("pyarrow.parquet").ParquetWriter(file, self._schema)

    def write_table(self, table: Any) -> None:
        """Append rows."""
        columns = [_as_type(table.column(field.name), field.type) for field in self._schema]
        self._writer.write_table(pyarrow().Table.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class _TextWriter:
    """Writes CSV, with lists as cells of JSON, or JSON lines."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file = file
        self._is_csv = suffix == ".csv"
        self._has_header = False

    def write_table(self, table: Any) -> None:
        """Raises DataError for a value that JSON cannot express."""
        if not self._is_csv:
            self._file.writelines(_json(row).encode() + b"\n" for row in python_rows(table))
            return
        arrow, reader = pyarrow(), pyarrow("pyarrow.csv")
        types = arrow.types
        for index, field in enumerate(table.schema):
            if types.is_nested(field.type) or types.is_duration(field.type):
                texts = [_text(value) for value in table.column(index).to_pylist()]
                table = table.set_column(index, field.name, arrow.array(texts, arrow.string()))
        options = reader.WriteOptions(include_header=not self._has_header)
        reader.write_csv(table, self._file, options)
        self._has_header = True

    def close(self) -> None:
        """Nothing is buffered."""


def _plain(value: Any) -> str | None:
    """A value of a type that JSON lacks, such as a date, as text."""
    if isinstance(value, (bytes, set)):
        raise TypeError(f"{type(value).__name__} is not a type of JSON")
    return text_of(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        fix = "write .parquet, or leave the column out with predict.columns=[...]"
        raise DataError("the input has a value that JSON has no form for", got=error, fix=fix) from None
