"""The columns of a table on the disk, built once and mapped into memory, so that any row is had at once.

A cache is a folder named by the fingerprint of source, layout and policy. In `columns` lie the arrays of `Columns`, row
after row, and `table.json`, which is written last; the folder appears whole or not at all. It costs 8 bytes a row for
each number, key and list item, a bit for each key, and one reading of the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.shard import digest
from kitforge.data.tables.chunk import BadRows
from kitforge.data.tables.columns import Columns, Layout, Lists, MemoryTable, Table, concatenate
from kitforge.data.tables.reading import read
from kitforge.data.tables.source import TableSource
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import atomic_folder, one_at_a_time, write_text
from kitforge.foundation.log import logger

_log = logger(__name__)

FORMAT = 1
_MANIFEST = "table.json"
# Tells rows read, while a cache is built.
Progress = Callable[[int], None]


@final
class ColumnCache:
    """An opened cache."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        manifest = _manifest(folder)
        self.layout = layout
        self.fingerprint: str = manifest["fingerprint"]
        self.num_rows: int = manifest["num_rows"]
        # Rows that the policy left out when the cache was built, by reason.
        self.bad_rows: dict[str, int] = manifest["bad_rows"]
        num_keys = len(layout.keys)
        self._numbers = _mapped(folder, "numbers", np.float64, (self.num_rows, len(layout.numbers)))
        self._keys = _mapped(folder, "keys", np.int64, (self.num_rows, num_keys))
        self._absent = _mapped(folder, "absent", np.uint8, (self.num_rows, -(-num_keys // 8)))
        self._labels = None if layout.label is None else _mapped(folder, "labels", np.float32, (self.num_rows,))
        self._lists = {}
        for place, column in enumerate(layout.lists):
            offsets = _mapped(folder, f"offsets_{place}", np.int64, (self.num_rows + 1,))
            values = _mapped(folder, f"values_{place}", np.int64, (int(offsets[-1]),))
            self._lists[column.name] = Lists(values=values, offsets=offsets)

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
    layout: Layout,
    root: Path,
    bad: BadRows,
    *,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """The table of a source: from its cache below `root`, which is built if it is not there yet, or in memory where
    the rows were handed over. Raises DataError for what is wrong with the rows or the disk."""
    if source.fingerprint is None:
        return _in_memory(source, layout, bad, num_workers)
    fingerprint = digest("column_cache", FORMAT, source.fingerprint, layout.fingerprint, bad.policy)
    folder = root / fingerprint
    columns = folder / "columns"
    try:
        if not (columns / _MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            with one_at_a_time(folder, _log, "building the column cache"):
                # Whoever held the lock before may have built it.
                if not (columns / _MANIFEST).exists():
                    parts = _counted(read(source, layout, bad, num_workers), progress)
                    _build(columns, layout, parts, fingerprint, bad)
        cache = ColumnCache(columns, layout)
    except OSError as error:
        raise DataError(
            f"cannot write the column cache {folder}",
            got=error.strerror or error,
            fix="free some room, or choose another place: data.cache=FOLDER",
        ) from None
    bad.counts.update({reason: max(0, num - bad.counts[reason]) for reason, num in cache.bad_rows.items()})
    return cache


def _counted(parts: Iterator[Columns], progress: Progress | None) -> Iterator[Columns]:
    num_rows = 0
    for part in parts:
        num_rows += len(part)
        if progress is not None:
            progress(num_rows)
        yield part


def _in_memory(source: TableSource, layout: Layout, bad: BadRows, num_workers: int | None) -> MemoryTable:
    columns = concatenate(list(read(source, layout, bad, num_workers)))
    lists = [(name, item.values.tobytes(), item.offsets.tobytes()) for name, item in columns.lists.items()]
    labels = None if columns.labels is None else columns.labels.tobytes()
    mark = digest("rows", columns.numbers.tobytes(), columns.keys.tobytes(), columns.absent.tobytes(), lists, labels)
    return MemoryTable(layout, columns, digest(mark, layout.fingerprint))


def _build(folder: Path, layout: Layout, parts: Iterator[Columns], fingerprint: str, bad: BadRows) -> None:
    num_rows = 0
    lengths = dict.fromkeys((column.name for column in layout.lists), 0)
    with atomic_folder(folder) as draft:
        with ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            for part in parts:
                for name, array in _arrays(part, layout, lengths, is_first=num_rows == 0):
                    if name not in files:
                        files[name] = stack.enter_context(open(draft / f"{name}.bin", "wb"))
                    files[name].write(np.ascontiguousarray(array).data)
                num_rows += len(part)
                for name, lists in part.lists.items():
                    lengths[name] += int(lists.offsets[-1])
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        manifest = {"format": FORMAT, "fingerprint": fingerprint, "num_rows": num_rows, "bad_rows": dict(bad.counts)}
        write_text(draft / _MANIFEST, json.dumps(manifest, indent=1))


def _arrays(
    part: Columns, layout: Layout, lengths: Mapping[str, int], *, is_first: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    """What goes to the end of each file; offsets go on from the lists that are there."""
    if layout.numbers:
        yield "numbers", part.numbers
    if layout.keys:
        yield "keys", part.keys
        yield "absent", np.packbits(part.absent, axis=1)
    if part.labels is not None:
        yield "labels", part.labels
    for place, column in enumerate(layout.lists):
        lists = part.lists[column.name]
        yield f"values_{place}", lists.values
        yield f"offsets_{place}", lists.offsets[0 if is_first else 1 :] + lengths[column.name]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, error, "the JSON that ends a finished cache") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, str(manifest)[:60], f"format {FORMAT}")
    return manifest


def _mapped(folder: Path, name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    path, expected = folder / f"{name}.bin", int(np.prod(shape)) * np.dtype(dtype).itemsize
    if expected == 0:
        return np.zeros(shape, dtype)
    size = path.stat().st_size if path.exists() else None
    if size != expected:
        raise _damaged(path, "no file" if size is None else f"{size} bytes", f"{expected} bytes")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _damaged(path: Path, got: object, expected: str) -> DataError:
    return DataError(
        f"the column cache file {path} is damaged",
        got=got,
        expected=expected,
        fix=f"delete the folder {path.parent}; it is built anew",
    )
