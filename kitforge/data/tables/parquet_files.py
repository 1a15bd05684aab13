"""Rows of Parquet files, a row group at a time."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kitforge.data.readers import parquet_file
from kitforge.data.tables.bad_rows import ArrowChunk, check_names
from kitforge.data.tables.cells import pyarrow
from kitforge.data.tables.part import Job, TablePart

# A row group of more bytes than this is read in parts, one after the other.
_GROUP_BYTES = 2**28
_PART_ROWS = 65_536


def open_parquet(path: Path) -> TablePart:
    """The file at `path`. Raises DataError when it is none."""
    with parquet_file(path) as file:
        names = tuple(file.schema_arrow.names)
    check_names(str(path), names)
    return TablePart(name=str(path), find_names=lambda: names, chunks=partial(_chunks, path))


def _chunks(path: Path, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
    start = 0
    with parquet_file(path) as file:
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group)
            if size.total_byte_size <= _GROUP_BYTES:
                yield partial(_group, path, file.metadata, group, start, columns)
                start += size.num_rows
                continue
            for batch in file.iter_batches(batch_size=_PART_ROWS, row_groups=[group], columns=list(columns)):
                yield partial(ArrowChunk, table=pyarrow().table(batch), location=partial(_location, path, start))
                start += len(batch)


def _group(path: Path, metadata: Any, group: int, start: int, columns: tuple[str, ...]) -> ArrowChunk:
    # Each reader has its own handle; the metadata of the file is shared.
    with parquet_file(path, metadata) as file:
        table = file.read_row_group(group, columns=list(columns), use_threads=False)
    return ArrowChunk(table=table, location=partial(_location, path, start))


def _location(path: Path, start: int, row: int) -> str:
    return f"{path}, row {start + row + 1},"
