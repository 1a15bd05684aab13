"""Rows of JSON Lines: an object a line, packed or not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from kitforge.data.file_bytes import FileStamp, stamp_of
from kitforge.data.tables.bad_rows import ArrowChunk
from kitforge.data.tables.csv_files import Job, first_line, text_blocks
from kitforge.data.tables.python_rows import columns_of_rows, mappings_chunk
from kitforge.foundation.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesFile:
    """A file with a JSON object a line; an empty line is not a row."""

    path: Path
    files: tuple[tuple[Path, FileStamp], ...]  # all of the table, of which each has the columns of all
    known: frozenset[str] = frozenset()  # names that a line may not misspell

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns. To find them costs a second, which a rank that maps the columns of another one saves."""
        return _names_of(self.files)

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks of the file in order, to be parsed by any thread. A name that a line lacks is a missing value."""
        for line, raw in text_blocks(self.path, False):
            yield partial(self._parse, raw, line, tuple(columns))

    def _parse(self, raw: bytes, first: int, columns: tuple[str, ...]) -> ArrowChunk:
        rows = list(_objects(raw, first))
        return mappings_chunk(rows, columns, self.known, lambda line: f"{self.path}:{line}", "a JSON object")


def open_json_lines(path: Path) -> JsonLinesFile:
    """The file at `path`, a table of its own. Raises DataError when its first line is not an object."""
    line = first_line(path)
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, Mapping):
        expected = '{"column": value, ...}'
        raise DataError(f"the first line of {path} is not a JSON object", got=line[:60], expected=expected)
    return JsonLinesFile(path=path, files=((path, stamp_of(path)),))


def with_all_names(parts: Sequence[Any]) -> list[Any]:
    """The parts of a table, of which the files of JSON Lines have all columns of the first lines of these files."""
    files = tuple(file for part in parts if isinstance(part, JsonLinesFile) for file in part.files)
    return [replace(part, files=files) if isinstance(part, JsonLinesFile) else part for part in parts]


@lru_cache(maxsize=8)
def _names_of(files: tuple[tuple[Path, FileStamp], ...]) -> tuple[str, ...]:
    blocks = (block for path, _ in files for block in text_blocks(path, False))
    return columns_of_rows(row for line, raw in blocks for _, row in _objects(raw, line))


def _objects(raw: bytes, first: int) -> Iterator[tuple[int, Any]]:
    """The lines that are not empty, with their numbers; the error of one that is not JSON."""
    for line, text in enumerate(raw.split(b"\n"), start=first):
        if not text.strip():
            continue
        try:
            yield line, json.loads(text)
        except ValueError as error:
            yield line, error
