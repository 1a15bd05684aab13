"""Rows of text files: Criteo's TSV, CSV and TSV with a header, compressed or not. Errors name the line."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kitforge.data.file_bytes import BYTE_ORDER_MARK, opened, text_blocks
from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, Problem
from kitforge.data.tables.cells import pyarrow
from kitforge.data.tables.part import Job, TablePart
from kitforge.foundation.errors import DataError

# A record is at most this long; a quote that is never closed would swallow the whole file.
RECORD_BYTES = 2**25
CRITEO_COLUMNS = ("label", *(f"I{index}" for index in range(1, 14)), *(f"C{index}" for index in range(1, 27)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file with a record a line (or more, where a cell in quotes has line breaks)."""

    path: Path
    names: tuple[str, ...]
    delimiter: str
    has_header: bool
    has_quotes: bool
    missing: tuple[str, ...] = ("",)  # texts that mean a missing value

    @property
    def part(self) -> TablePart:
        """The file as a part of a table."""
        return TablePart(
            name=str(self.path), find_names=lambda: self.names, chunks=self._chunks, delimiter=self.delimiter
        )

    def _chunks(self, columns: tuple[str, ...], _known: frozenset[str]) -> Iterator[Job]:
        is_head = self.has_header
        for first_line, raw in text_blocks(self.path, has_quotes=self.has_quotes, longest=RECORD_BYTES):
            head = 0
            if is_head:
                head = raw.find(b"\n") + 1 or len(raw)
                is_head = False
            # The header becomes an empty line, which keeps the count of lines.
            yield partial(self._parse, b"\n" + raw[head:] if head else raw, first_line, columns)

    def _parse(self, raw: bytes, first_line: int, columns: tuple[str, ...]) -> ArrowChunk:
        block, bad, skipped = _Block(file=self, raw=raw, first_line=first_line), list[BadRow](), list[Any]()
        try:
            table = self._table(raw, columns, skipped)
        except pyarrow().ArrowInvalid:
            skipped.clear()
            block, bad = block.decodable()
            table = self._table(block.raw, columns, skipped)
        records = [row.number - 1 for row in skipped]
        bad += [block.wrong_cells(record, row.actual_columns) for record, row in zip(records, skipped, strict=True)]
        return ArrowChunk(table=table, location=block.location(records), bad=tuple(bad))

    def _table(self, raw: bytes, columns: tuple[str, ...], skipped: list[Any]) -> Any:
        reader = pyarrow("pyarrow.csv")
        if not raw.strip(b"\r\n"):
            return pyarrow().table({name: pyarrow().array([], pyarrow().string()) for name in columns})

        def skip(row: Any) -> str:
            skipped.append(row)
            return "skip"

        return reader.read_csv(
            pyarrow().BufferReader(raw),
            read_options=reader.ReadOptions(column_names=self.names, use_threads=False, block_size=len(raw) + 1),
            parse_options=reader.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if self.has_quotes else False,
                newlines_in_values=self.has_quotes,
                invalid_row_handler=skip,
            ),
            convert_options=reader.ConvertOptions(
                column_types=dict.fromkeys(columns, pyarrow().string()),
                include_columns=columns,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=list(self.missing),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Whole records of a file."""

    file: TextFile
    raw: bytes
    first_line: int  # number of the first line, from 1

    def lines(self) -> list[int]:
        """The number of the line on which each record begins; an empty line is not a record."""
        if not (self.file.has_quotes and b'"' in self.raw):
            parts = self.raw.split(b"\n")
            return [self.first_line + index for index, part in enumerate(parts) if part.strip(b"\r")]
        lines, begin = [], 0
        text = io.StringIO(self.raw.decode("utf-8", "replace"), newline="")
        rows = csv.reader(text, delimiter=self.file.delimiter)
        for row in rows:
            if row:
                lines.append(self.first_line + begin)
            begin = rows.line_num
        return lines

    def location(self, skipped: list[int]) -> Callable[[int], str]:
        """The locations of the rows of a table without the records `skipped`."""

        def find(row: int) -> str:
            left_out = set(skipped)
            kept = [line for record, line in enumerate(self.lines()) if record not in left_out]
            return f"{self.file.path}:{kept[row]}"

        return find

    def decodable(self) -> tuple[_Block, list[BadRow]]:
        """The block with every line that is not UTF-8 made empty, and these lines."""
        parts, bad = self.raw.split(b"\n"), []
        for number, part in enumerate(parts):
            try:
                part.decode()
            except UnicodeDecodeError as error:
                problem = Problem(
                    reason="is not UTF-8",
                    got=f"byte 0x{part[error.start]:02x} at place {error.start} of the line",
                    expected="UTF-8 throughout",
                    fix="convert the file",
                )
                location = f"{self.file.path}:{self.first_line + number}"
                bad.append(BadRow(problem=problem, location=partial(str, location)))
                parts[number] = b""
        return _Block(file=self.file, raw=b"\n".join(parts), first_line=self.first_line), bad

    def wrong_cells(self, record: int, count: int) -> BadRow:
        """The bad row about a record with too many or too few cells."""
        problem = Problem(
            reason="has the wrong number of cells",
            got=count,
            expected=f"{len(self.file.names)} cells",
            fix="put cells that hold separators, quotes or line breaks in double quotes"
            if self.file.has_quotes
            else None,
        )
        return BadRow(problem=problem, location=lambda: f"{self.file.path}:{self.lines()[record]}")


def first_line(path: Path) -> str:
    """The first line of a file, for detecting its format. Raises DataError for an empty file."""
    with opened(path) as stream:
        raw = stream.readline(RECORD_BYTES).removeprefix(BYTE_ORDER_MARK)
    if not raw.strip():
        raise DataError(f"{path} is empty", got="no first line", expected="rows of a table")
    try:
        return raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:1 is not UTF-8",
            got=f"byte 0x{raw[error.start]:02x} at place {error.start}",
            fix="convert the file",
        ) from None
