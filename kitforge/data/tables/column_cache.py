"""The columns of a table on the disk, built once and mapped into memory, so that any row is had at once.

A cache is a folder named by the fingerprint of source, layout and policy, with the arrays of `Columns`, row after row,
and the manifest `table.json`. It costs 8 bytes a row for each number, key and list item, a bit for each key, and one
reading of the table. While it is built, `progress.json` says how far the files are on the disk for certain, so a build
that was killed goes on from there.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, Columns, ColumnTable, InMemoryTable, ListValues, concatenate
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import TableSource
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import sha256, write_text

FORMAT = 4
_PROGRESS = "progress.json"
# A build that is killed loses at most about as many bytes of columns.
_STRIDE = 2**27
# Called with the number of rows read while a cache is built.
Progress = Callable[[int], None]


class ColumnCache:
    """An opened cache."""

    def __init__(self, folder: Path, layout: ColumnLayout) -> None:
        cache_folder = _cache_folder(folder)
        manifest = cache_folder.manifest()
        self.layout = layout
        self.fingerprint: str = manifest["fingerprint"]
        self.num_rows: int = manifest["num_rows"]
        # Rows that the policy left out when the cache was built, by reason.
        self.bad_rows: dict[str, int] = manifest["bad_rows"]
        num_keys = len(layout.keys)
        self._numbers = cache_folder.mapped("numbers.bin", np.float64, (self.num_rows, len(layout.numbers)))
        self._keys = cache_folder.mapped("keys.bin", np.int64, (self.num_rows, num_keys))
        self._absent = cache_folder.mapped("absent.bin", np.uint8, (self.num_rows, -(-num_keys // 8)))
        self._labels = None if layout.label is None else cache_folder.mapped("labels.bin", np.float32, (self.num_rows,))
        self._lists = {}
        for number, column in enumerate(layout.lists):
            offsets = cache_folder.mapped(f"offsets_{number}.bin", np.int64, (self.num_rows + 1,))
            values = cache_folder.mapped(f"values_{number}.bin", np.int64, (int(offsets[-1]),))
            self._lists[column.name] = ListValues(values=values, offsets=offsets)

    def rows(self, indices: NDArray[np.int64]) -> Columns:
        """The rows of these numbers, in this order."""
        absent = np.unpackbits(self._absent[indices], axis=1, count=len(self.layout.keys)).astype(bool)
        return Columns(
            numbers=np.asarray(self._numbers[indices]),
            keys=np.asarray(self._keys[indices]),
            absent=absent,
            lists={name: lists.take(indices) for name, lists in self._lists.items()},
            labels=None if self._labels is None else np.asarray(self._labels[indices]),
        )


def load_table(
    source: TableSource,
    layout: ColumnLayout,
    root: Path,
    bad: BadRows,
    *,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> ColumnTable:
    """The table of a source: from its cache below `root`, which is built if it is not there yet, or in memory where
    the rows were handed over. Raises DataError for what is wrong with the rows or the disk."""
    if source.fingerprint is None:
        table = _in_memory(source, layout, bad, num_workers)
        bad.log_summary(source.name, table.num_rows)
        return table
    folder = root / fingerprint_of("column_cache", FORMAT, source.fingerprint, layout.fingerprint, bad.policy)

    def fill() -> dict[str, Any]:
        done = _Done.of(folder, layout)
        bad_rows = BadRows(policy=bad.policy, counts=Counter(done.bad_rows))
        try:
            _write(
                folder,
                layout,
                read_columns(source, layout, bad_rows, num_workers, start=done.num_chunks),
                done,
                bad_rows,
                progress,
            )
        except DataError:
            # A repaired table has another fingerprint, so this partial build would never be resumed.
            for name in (_PROGRESS, *done.sizes):
                (folder / name).unlink(missing_ok=True)
            raise
        (folder / _PROGRESS).unlink(missing_ok=True)
        # Of the content, so that copied files have the same fingerprint.
        content = [(name, sha256(folder / name)) for name in sorted(done.sizes)]
        fingerprint = fingerprint_of("columns", content, layout.fingerprint)
        return {"fingerprint": fingerprint, "num_rows": done.num_rows, "bad_rows": done.bad_rows}

    _cache_folder(folder).build(fill)
    cache = ColumnCache(folder, layout)
    bad.counts.update(cache.bad_rows)
    bad.log_summary(source.name, cache.num_rows)
    return cache


def _cache_folder(folder: Path) -> CacheFolder:
    return CacheFolder(
        path=folder, what="column cache", manifest_name="table.json", format=FORMAT, elsewhere=": data.cache=FOLDER"
    )


def _in_memory(source: TableSource, layout: ColumnLayout, bad: BadRows, num_workers: int | None) -> InMemoryTable:
    columns = concatenate(list(read_columns(source, layout, bad, num_workers)))
    lists = [(name, item.values.tobytes(), item.offsets.tobytes()) for name, item in columns.lists.items()]
    labels = None if columns.labels is None else columns.labels.tobytes()
    mark = fingerprint_of(
        "rows", columns.numbers.tobytes(), columns.keys.tobytes(), columns.absent.tobytes(), lists, labels
    )
    return InMemoryTable(layout, columns, fingerprint_of(mark, layout.fingerprint))


@dataclass(slots=True, kw_only=True)
class _Done:
    """How far a build has come."""

    num_chunks: int = 0  # of the source
    num_rows: int = 0
    bad_rows: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int]  # bytes of each file

    @classmethod
    def of(cls, folder: Path, layout: ColumnLayout) -> _Done:
        """The durable progress of an earlier build; empty if it is inconsistent."""
        path = folder / _PROGRESS
        if path.exists():
            done = cls(**json.loads(path.read_bytes()))
            there = {name: (folder / name).stat().st_size for name in done.sizes if (folder / name).exists()}
            if all(there.get(name, -1) >= size for name, size in done.sizes.items()):
                return done
        return cls(sizes=dict.fromkeys(_names(layout), 0))


def _names(layout: ColumnLayout) -> Iterator[str]:
    yield from ("numbers.bin", "keys.bin", "absent.bin")
    if layout.label is not None:
        yield "labels.bin"
    for index in range(len(layout.lists)):
        yield from (f"offsets_{index}.bin", f"values_{index}.bin")


def _write(
    folder: Path, layout: ColumnLayout, parts: Iterator[Columns], done: _Done, bad: BadRows, progress: Progress | None
) -> None:
    """Append the parts to the files, `done` going along, and say from time to time how far that is."""
    kept = sum(done.sizes.values())
    with ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        for name, size in done.sizes.items():
            files[name] = stack.enter_context(open(folder / name, "ab"))
            # Later bytes may be incomplete.
            files[name].truncate(size)
            files[name].seek(size)
        for part in parts:
            for name, array in _arrays(part, layout, files):
                files[name].write(np.ascontiguousarray(array).data)
            done.num_chunks += 1
            done.num_rows += len(part)
            done.bad_rows = dict(bad.counts)
            done.sizes = {name: file.tell() for name, file in files.items()}
            if sum(done.sizes.values()) - kept >= _STRIDE:
                _sync(files)
                write_text(folder / _PROGRESS, json.dumps(asdict(done)))
                kept = sum(done.sizes.values())
            if progress is not None:
                progress(done.num_rows)
        _sync(files)


def _sync(files: Mapping[str, IO[bytes]]) -> None:
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())


def _arrays(part: Columns, layout: ColumnLayout, files: Mapping[str, IO[bytes]]) -> Iterator[tuple[str, NDArray[Any]]]:
    """What goes to the end of each file; offsets go on from the lists that are there."""
    yield "numbers.bin", part.numbers
    yield "keys.bin", part.keys
    yield "absent.bin", np.packbits(part.absent, axis=1)
    if part.labels is not None:
        yield "labels.bin", part.labels
    for index, column in enumerate(layout.lists):
        lists, offsets, values = part.lists[column.name], f"offsets_{index}.bin", f"values_{index}.bin"
        yield offsets, lists.offsets[0 if files[offsets].tell() == 0 else 1 :] + files[values].tell() // 8
        yield values, lists.values
