"""Interaction logs: a line `user item` each, in order of time within a user; a row is a user with all items."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import ArrowChunk, BadRow
from kitforge.data.tables.cells import pyarrow
from kitforge.data.tables.columns import ColumnLayout, KeyColumn
from kitforge.data.tables.csv_files import TextFile
from kitforge.data.tables.part import Job, TablePart
from kitforge.foundation.errors import DataError

_LAYOUT = ColumnLayout(keys=tuple(KeyColumn(name=name, kind="integer", is_required=True) for name in ("user", "item")))


def open_interactions(path: Path, delimiter: str) -> TablePart:
    """A file of pairs of whole numbers, the lines of a user one behind the other."""
    lines = TextFile(path=path, names=("user", "item"), delimiter=delimiter, has_header=False, has_quotes=False)
    return TablePart(name=str(path), find_names=lambda: ("user", "items"), chunks=partial(_chunks, lines))


def _chunks(lines: TextFile, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
    """Chunks of whole users, in order."""
    seen = _Seen(lines.path)
    users, items, bad = np.zeros(0, np.int64), np.zeros(0, np.int64), list[BadRow]()
    for job in lines.part.jobs(lines.names):
        parsed, more = to_columns(job(), _LAYOUT)
        bad += more
        users, items = np.append(users, parsed.keys[:, 0]), np.append(items, parsed.keys[:, 1])
        # The last user may go on in the next block.
        cut = int(np.flatnonzero(users != users[-1])[-1]) + 1 if len(users) and users[0] != users[-1] else 0
        if cut:
            yield partial(_chunk, users[:cut], items[:cut], tuple(bad), columns, seen)
            users, items, bad = users[cut:], items[cut:], []
    yield partial(_chunk, users, items, tuple(bad), columns, seen)


def _chunk(
    users: NDArray[np.int64], items: NDArray[np.int64], bad: tuple[BadRow, ...], columns: tuple[str, ...], seen: _Seen
) -> ArrowChunk:
    firsts = np.flatnonzero(np.append(True, users[1:] != users[:-1])[: len(users)])
    seen.add(users[firsts])
    arrow = pyarrow()
    offsets = np.append(firsts, len(users)).astype(np.int64)
    arrays = {"user": arrow.array(users[firsts]), "items": arrow.LargeListArray.from_arrays(offsets, items)}
    table = arrow.table({name: arrays[name] for name in columns})
    return ArrowChunk(table=table, location=lambda row: f"{seen.path}, user {users[firsts][row]},", bad=bad)


class _Seen:
    """The users that have ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users: set[int] = set()

    def add(self, users: NDArray[np.int64]) -> None:
        """Take note of users; DataError when one comes a second time."""
        new = set(users.tolist())
        again = new & self._users
        if len(new) < len(users):
            values, counts = np.unique(users, return_counts=True)
            again |= {int(values[np.argmax(counts)])}
        if again:
            raise DataError(
                f"{self.path} has user {min(again)} in two places",
                expected="all lines of a user one behind the other, in order of time",
                fix="sort the file by user, keeping the order within: sort -s -n -k1,1",
            )
        self._users |= new
