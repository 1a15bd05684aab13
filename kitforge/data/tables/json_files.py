"""Rows of JSON Lines: an object a line, packed or not."""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

from kitforge.data.file_bytes import FileStamp, json_lines, text_blocks
from kitforge.data.tables.bad_rows import ArrowChunk
from kitforge.data.tables.csv_files import RECORD_BYTES, first_line
from kitforge.data.tables.part import Job, TablePart
from kitforge.data.tables.python_rows import columns_of_rows, mappings_chunk
from kitforge.foundation.errors import DataError


def open_json_lines(path: Path, files: tuple[tuple[Path, FileStamp], ...]) -> TablePart:
    """The file at `path`, in which an empty line is not a row; it has the columns of all of `files`, those of the
    table. Raises DataError when its first line is not an object."""
    line = first_line(path)
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, Mapping):
        expected = '{"column": value, ...}'
        raise DataError(f"the first line of {path} is not a JSON object", got=line[:60], expected=expected)
    return TablePart(name=str(path), find_names=partial(_names_of, files), chunks=partial(_chunks, path))


def _chunks(path: Path, columns: tuple[str, ...], known: frozenset[str]) -> Iterator[Job]:
    for line, raw in text_blocks(path, longest=RECORD_BYTES):
        yield partial(_parse, path, raw, line, columns, known)


def _parse(path: Path, raw: bytes, first: int, columns: tuple[str, ...], known: frozenset[str]) -> ArrowChunk:
    rows = list(json_lines(raw, first))
    return mappings_chunk(rows, columns, known, lambda line: f"{path}:{line}", "a JSON object")


@lru_cache(maxsize=8)
def _names_of(files: tuple[tuple[Path, FileStamp], ...]) -> tuple[str, ...]:
    blocks = (block for path, _ in files for block in text_blocks(path, longest=RECORD_BYTES))
    return columns_of_rows(row for line, raw in blocks for _, row in json_lines(raw, line))
