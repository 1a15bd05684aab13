"""Writing of table rows: files are filled in memory and written while the next one is filled.

A file holds `ids` [n] int64 and `rows` [n, width]; of ids that went away, rows of no width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.manifest import REMOVED, FileEntry, RowsEntry, TableEntry, plain
from kitforge.core.optim.table_protocols import Chunk, RowSource
from kitforge.foundation.errors import CheckpointError

# Of one file. Twice as much is held in memory: one file is written while the next is gathered.
FILE_BYTES = 2**27


class TableWriter:
    """Writes the tables of one rank to a folder. `rank` is None for a single process."""

    def __init__(self, folder: Path, step: int, rank: int | None = None, file_bytes: int = FILE_BYTES) -> None:
        self.files: list[FileEntry] = []
        self.tables: list[TableEntry] = []
        self._folder = folder
        self._step = step
        self._rank = rank
        self._file_bytes = file_bytes

    def write(self, sources: Mapping[str, RowSource]) -> None:
        """Write every table, by name. Raises CheckpointError for ids that are not int64, or rows of a part that differ
        in width or dtype."""
        for name, source in sources.items():
            self._write(name, source)

    def _write(self, name: str, source: RowSource) -> None:
        streams: dict[str, Iterable[Chunk]] = {part: source.chunks(part) for part in source.parts}
        if source.since is not None:
            streams[REMOVED] = ((ids, ids.new_empty(len(ids), 0)) for ids in source.removed())
        rows: list[RowsEntry] = []
        for part, chunks in streams.items():
            words = [
                "table",
                _quoted(name),
                quote(part, safe=""),
                *([] if self._rank is None else [f"r{self._rank:05}"]),
            ]
            files = list(self._write_part(self._folder / "-".join(words), chunks))
            rows += [
                RowsEntry(file=file.name, part=part, num_rows=num_rows, shard=source.shard) for file, num_rows in files
            ]
            self.files += [file for file, _ in files]
        state = ""
        if source.state:
            # What belongs to no row; of many ranks, which have it alike, the first writes it.
            state = f"table-{_quoted(name)}-state.safetensors"
            if not self._rank:
                tensors = [(key, tensor.detach().cpu()) for key, tensor in source.state.items()]
                self.files.append(safetensors_file.write_shard(self._folder / state, tensors, self._step))
        self.tables.append(
            TableEntry(
                name=name,
                schema=plain(source.schema, f"the schema of table {name!r}"),
                version=source.version,
                since=source.since,
                state=state,
                rows=tuple(rows),
            )
        )

    def _write_part(self, base: Path, chunks: Iterable[Chunk]) -> Iterator[tuple[FileEntry, int]]:
        """Write files that begin with `place`; yields each with the number of its rows."""
        with ThreadPoolExecutor(1, thread_name_prefix="table-files") as thread:
            before: tuple[Future[FileEntry], int] | None = None
            for number, (ids, rows) in enumerate(_gathered(chunks, self._file_bytes), start=1):
                path = base.with_name(f"{base.name}-{number:05}.safetensors")
                written = thread.submit(safetensors_file.write_shard, path, [("ids", ids), ("rows", rows)], self._step)
                # The buffer that is filled next is that of the file before.
                if before is not None:
                    yield before[0].result(), before[1]
                before = (written, len(ids))
            if before is not None:
                yield before[0].result(), before[1]


def merge_entries(shares: Sequence[Sequence[TableEntry]]) -> tuple[TableEntry, ...]:
    """Merge the table entries of all ranks. Raises CheckpointError if ranks differ."""
    for rank, tables in enumerate(shares):
        saved, first = ([replace(table, rows=()) for table in each] for each in (tables, shares[0]))
        if saved != first:
            raise CheckpointError(f"rank {rank} saves other tables than rank 0", got=saved, expected=first)
    return tuple(
        replace(tables[0], rows=tuple(rows for table in tables for rows in table.rows))
        for tables in zip(*shares, strict=True)
    )


def _quoted(name: str) -> str:
    """The table name as part of a file name: special characters and dashes are quoted, so names stay distinct."""
    return quote(name, safe="").replace("-", "%2D")


class _Buffer:
    """Room for the rows of one file, the size of which the first rows decide."""

    def __init__(self, ids: Tensor, rows: Tensor, file_bytes: int) -> None:
        width = rows.shape[1:].numel()
        room = max(1, file_bytes // (ids.element_size() + width * rows.element_size()))
        self._ids = torch.empty(room, dtype=torch.int64)
        self._rows = torch.empty(room, width, dtype=rows.dtype)
        self._num_rows = 0

    @property
    def is_full(self) -> bool:
        """Whether no row more has room."""
        return self._num_rows == len(self._ids)

    def fill(self, ids: Tensor, rows: Tensor) -> int:
        """Copy as many rows, from the first on, as have room; returns how many."""
        is_row = rows.dtype == self._rows.dtype and rows.shape[1:] == self._rows.shape[1:]
        if ids.dtype != torch.int64 or ids.shape != rows.shape[:1] or not is_row:
            raise CheckpointError(
                "a table gave rows that cannot be stored",
                got=f"ids {ids.dtype} {list(ids.shape)}, rows {rows.dtype} {list(rows.shape)}",
                expected=f"ids torch.int64 [n], rows {self._rows.dtype} [n, {self._rows.shape[1]}]",
            )
        num_rows = min(len(ids), len(self._ids) - self._num_rows)
        end = self._num_rows + num_rows
        self._ids[self._num_rows : end] = ids[:num_rows]
        self._rows[self._num_rows : end] = rows[:num_rows]
        self._num_rows = end
        return num_rows

    def filled(self) -> Chunk:
        """The rows so far, not copied; the next ones begin anew."""
        num_rows, self._num_rows = self._num_rows, 0
        return self._ids[:num_rows], self._rows[:num_rows]


def _gathered(chunks: Iterable[Chunk], file_bytes: int) -> Iterator[Chunk]:
    """The rows of one file after the other. A yielded chunk stays valid until the next but one is requested."""
    buffers: list[_Buffer] = []
    for ids, rows in chunks:
        if not buffers and len(ids):
            buffers = [_Buffer(ids, rows, file_bytes) for _ in range(2)]
        start = 0
        while start < len(ids):
            start += buffers[0].fill(ids[start:], rows[start:])
            if buffers[0].is_full:
                yield buffers[0].filled()
                buffers.reverse()
    if buffers:
        rest = buffers[0].filled()
        if len(rest[0]):
            yield rest
