"""Rows of Parquet files, a row group at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kitforge.data.tables.bad_rows import ArrowChunk, check_names
from kitforge.data.tables.cells import pyarrow
from kitforge.data.tables.csv_files import Job
from kitforge.data.tables.table_file import TableFile
from kitforge.foundation.errors import DataError

# A row group of more bytes than this is read in parts, one after the other.
_GROUP_BYTES = 2**28
_PART_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile(TableFile):
    """A file whose schema is known."""

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks of the file in order, to be read by any thread."""
        start = 0
        with _opened(self.path) as file:
            metadata = file.metadata
            for group in range(metadata.num_row_groups):
                size = metadata.row_group(group)
                if size.total_byte_size <= _GROUP_BYTES:
                    yield partial(self._group, metadata, group, start, tuple(columns))
                else:
                    yield from self._parts(file, group, start, columns)
                start += size.num_rows

    def _group(self, metadata: Any, group: int, start: int, columns: tuple[str, ...]) -> ArrowChunk:
        try:
            # Each reader has its own handle; the metadata of the file is shared.
            with pyarrow("pyarrow.parquet").ParquetFile(self.path, metadata=metadata) as file:
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
        except (OSError, ValueError) as error:
            raise _damaged(self.path, error) from None
        return ArrowChunk(table=table, location=partial(self._location, start))

    def _parts(self, file: Any, group: int, start: int, columns: Sequence[str]) -> Iterator[Job]:
        batches = file.iter_batches(batch_size=_PART_ROWS, row_groups=[group], columns=list(columns))
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError) as error:
                raise _damaged(self.path, error) from None
            if batch is None:
                return
            yield partial(ArrowChunk, table=pyarrow().table(batch), location=partial(self._location, start))
            start += len(batch)

    def _location(self, start: int, row: int) -> str:
        return f"{self.path}, row {start + row + 1},"


def open_parquet(path: Path) -> ParquetFile:
    """The file at `path`. Raises DataError when it is none."""
    with _opened(path) as file:
        check_names(str(path), file.schema_arrow.names)
        return ParquetFile(path=path, names=tuple(file.schema_arrow.names))


def _opened(path: Path) -> Any:
    try:
        return pyarrow("pyarrow.parquet").ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}", got=error, expected="a whole Parquet file")
