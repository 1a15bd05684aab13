"""Readers of documents from one file: plain text, JSON, JSON lines, CSV, Parquet, CoNLL."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from kitforge.data.document_shard import SHARD_BYTES, EncodingErrors, documents_of, fingerprint_of, missing_column
from kitforge.data.features import Features, python_rows, schema_features, with_json
from kitforge.data.file_bytes import (
    BYTE_ORDER_MARK,
    FileStamp,
    check_unchanged,
    format_suffix,
    is_packed,
    json_lines,
    opened,
    stamp_of,
    text_blocks,
)
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import DataError

_BLOCK_BYTES = 2**20
_PART = re.compile(r"\d+[-.]\d+")
# The tag of an entity, and not of a chunk of CoNLL-2000, of whose entities the tags are in the next column.
_ENTITY = re.compile(r"O|[BI]-(?!(?:NP|VP|PP|AD[JV]P|SBAR|PRT|CONJP|INTJ|LST|UCP)$).+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShard:
    """The documents of a file, or of one range of its bytes."""

    path: Path  # absolute
    column: str
    separator: str | None
    encoding_errors: EncodingErrors
    stamp: FileStamp  # when the corpus was opened
    start: int = 0
    # In bytes; None reads to the end, which is unknown for a compressed file.
    stop: int | None = None

    @property
    def fingerprint(self) -> str:
        """Made of path, size, times of change, range and every option that decides what is read. It finds what was made
        of this very file before; whether two files hold the same is told by what was made of them."""
        options = (self.column, self.separator, self.encoding_errors)
        return fingerprint_of("file", str(self.path), self.stamp, options, self.start, self.stop)

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return (self.stamp[0] if self.stop is None else self.stop) - self.start

    def documents(self) -> Iterator[str]:
        """Read the file. Raises DataError for whatever is wrong with it, by line or byte where there is one."""
        check_unchanged(self.path, self.stamp, "corpus")
        kind = format_of(self.path)
        if kind in _TEXTS:
            yield from filter(None, _read_text(self))
        else:
            yield from documents_of(_ROWS[kind](self, self.column), self.column, self.encoding_errors)

    @property
    def features(self) -> Features:
        """Those of a Parquet file."""
        if format_of(self.path) != ".parquet":
            return None
        return schema_features(_pyarrow().read_schema(self.path).metadata)

    def rows(self) -> Iterator[tuple[object, Any]]:
        """Every row with its location, which is formatted only for messages."""
        check_unchanged(self.path, self.stamp, "corpus")
        yield from _ROWS[format_of(self.path)](self, None)


def format_of(path: Path) -> str:
    """The suffix of the format: ".jsonl" for `a.jsonl.gz`. Raises DataError for an unknown one."""
    kind = format_suffix(path)
    if kind not in (*_TEXTS, *_ROWS) or (is_packed(path) and kind == ".parquet"):
        raise DataError(
            f"{path} is of no format that can be read",
            got=f"suffix {kind!r}" if kind else "no suffix",
            expected=f"{' '.join((*_TEXTS, *_ROWS))} (all but Parquet also packed, as .gz)",
            fix="rename the file to tell its format (.txt for plain text), or convert it",
        )
    return kind


def is_known(path: Path) -> bool:
    """Whether the file name has the suffix of a supported format."""
    try:
        return bool(format_of(path))
    except DataError:
        return False


def file_shards(path: Path, column: str, separator: str | None, encoding_errors: EncodingErrors) -> list[FileShard]:
    """The shards of one file: several ranges of bytes where a big file can be cut between documents."""
    path = path.absolute()
    kind = format_of(path)
    if kind == ".parquet":
        _pyarrow()
    single = FileShard(
        path=path, column=column, separator=separator, encoding_errors=encoding_errors, stamp=stamp_of(path)
    )
    mark = "\n" if kind == ".jsonl" else separator if kind in _TEXTS else None
    if mark is None or is_packed(path) or single.size < 2 * SHARD_BYTES:
        return [single]
    # Matches of a separator that can overlap itself depend on where the search starts.
    if any(mark.startswith(mark[start:]) for start in range(1, len(mark))):
        return [single]
    cuts = [0, *_cuts(single, mark.encode()), single.size]
    return [replace(single, start=start, stop=stop) for start, stop in pairwise(cuts)]


def _cuts(shard: FileShard, mark: bytes) -> Iterator[int]:
    """The end of the first mark after every so many bytes, in rising order."""
    cut = 0
    for begin in range(SHARD_BYTES, shard.size, SHARD_BYTES):
        if begin >= cut:
            _, record = next(_split_blocks(replace(shard, start=begin), mark))
            cut = begin + len(record) + len(mark)
            if cut < shard.size:
                yield cut


def _split_blocks(shard: FileShard, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """The texts between separators, with the offset of their first byte in the (decompressed) file."""
    offset, remaining, position = shard.start, b"", shard.start
    with opened(shard.path) as stream:
        stream.seek(shard.start)
        while True:
            # Blocks grow with an unfinished piece, or a very long one would be searched again for every block.
            wanted = max(_BLOCK_BYTES, len(remaining))
            block = stream.read(wanted if shard.stop is None else min(wanted, shard.stop - position))
            if not block:
                break
            position += len(block)
            *complete, remaining = (remaining + block).split(separator)
            for record in complete:
                yield offset, record
                offset += len(record) + len(separator)
    yield offset, remaining


def _decode(shard: FileShard, offset: int, raw: bytes) -> str:
    """The text of bytes that begin at `offset`; a byte order mark is not text."""
    if offset == 0 and raw.startswith(BYTE_ORDER_MARK):
        offset, raw = len(BYTE_ORDER_MARK), raw[len(BYTE_ORDER_MARK) :]
    try:
        return raw.decode("utf-8", shard.encoding_errors)
    except UnicodeDecodeError as error:
        raise _not_utf8(shard.path, error, f"offset {offset + error.start}") from None


def _not_utf8(location: object, error: UnicodeDecodeError, at: str) -> DataError:
    return DataError(
        f"{location} is not UTF-8",
        got=f"byte 0x{error.object[error.start]:02x} at {at}",
        expected="UTF-8 throughout (data.encoding_errors=strict)",
        fix="convert it, or data.encoding_errors=replace (marks such bytes with U+FFFD) or ignore (drops them)",
    )


def _everything(shard: FileShard) -> str:
    with opened(shard.path) as stream:
        return _decode(shard, 0, stream.read())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The location of a line. How many lines are before its shard is counted only for messages."""

    shard: FileShard
    index: int  # in the shard

    def __str__(self) -> str:
        first = _line_counter(self.shard.path, self.shard.stamp).lines_before(self.shard) if self.shard.start else 0
        return f"{self.shard.path}:{first + self.index + 1}"


class _LineCounter:
    """Counts the lines before shards of a file, on from the last one: shards in order are one pass of the file."""

    def __init__(self) -> None:
        self._start = 0
        self._lines = 0

    def lines_before(self, shard: FileShard) -> int:
        """The line breaks before the first byte of the shard."""
        if shard.start < self._start:
            self._start = self._lines = 0
        if shard.start > self._start:
            with opened(shard.path) as stream:
                stream.seek(self._start)
                while self._start < shard.start:
                    block = stream.read(min(_BLOCK_BYTES, shard.start - self._start))
                    if not block:
                        break
                    self._start, self._lines = self._start + len(block), self._lines + block.count(b"\n")
        return self._lines


@lru_cache(maxsize=8)
def _line_counter(_path: Path, _stamp: FileStamp) -> _LineCounter:
    return _LineCounter()


def _read_text(shard: FileShard) -> Iterator[str]:
    if shard.separator is None:
        yield _everything(shard)
        return
    for offset, raw in _split_blocks(shard, shard.separator.encode()):
        yield _decode(shard, offset, raw)


def _json_lines(shard: FileShard, _column: str | None) -> Iterator[tuple[object, Any]]:
    for first, raw in text_blocks(shard.path, start=shard.start, stop=shard.stop):
        for line, row in json_lines(raw, first, shard.encoding_errors):
            location = _Line(shard=shard, index=line - 1)
            if isinstance(row, UnicodeDecodeError):
                raise _not_utf8(location, row, f"place {row.start + 1} of the line")
            if isinstance(row, Exception):
                raise _not_json(location, row)
            yield location, row


def _tagged_sentences(shard: FileShard, _column: str | None) -> Iterator[tuple[object, Any]]:
    """A row for each sentence of a CoNLL file: a line for each word, which is its first column and has its tag in the
    last one, and empty lines between sentences. Columns are parted by tabs where every line has one, else by spaces. A
    first column that counts the words of every sentence is left out; where two columns of entities follow such a word,
    the last one has those within others, as in GermEval 2014, and the first one is read. Left out are -DOCSTART- and
    comments too (`# id 7`: another number of columns, or at the beginning of a sentence, with other than a tag at its
    end)."""
    lines = _everything(shard).split("\n")
    words = [line.strip() for line in lines if (line.split() or ["#"])[0] not in ("#", "-DOCSTART-")]
    mark = "\t" if all("\t" in line for line in words) else None
    width = len(words[0].split(mark)) if words else 2
    tags = {line.split(mark)[-1].strip() for line in words}
    sentences: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(lines, start=1):
        first, cells = line.split()[:1], [each.strip() for each in line.strip().split(mark)]
        if first == ["#"] and (len(cells) != width or not (sentences[-1] or cells[-1] in tags)):
            continue
        if not first or first == ["-DOCSTART-"]:
            sentences += [[]] if sentences[-1] else []
            continue
        if len(cells) != max(width, 2):
            got, expected = f"{len(cells)} columns", f"{max(width, 2)}: a word, and its tag in the last one"
            raise DataError(f"{shard.path}:{number} is not a word with its tag", got=got, expected=expected)
        sentences[-1].append((number, cells))
    # In CoNLL-U 1-2 is a word that is written as one with the next, and 1.1 one that is not written.
    counted = [[line for line in each if not _PART.fullmatch(line[1][0])] for each in sentences]
    is_counted = width > 2 and all(
        [cells[0] for _, cells in each] == [str(at) for at in range(1, len(each) + 1)] for each in counted
    )
    pairs = {tuple(cells[2:]) for each in counted for _, cells in each} if is_counted and width == 4 else set()
    is_nested = any(tag != "O" for tag, *_ in pairs) and all(map(_ENTITY.fullmatch, chain(*pairs)))
    for sentence in filter(None, counted if is_counted else sentences):
        found = [cells[is_counted:] for _, cells in sentence]
        columns = {"tokens": [each[0] for each in found], "ner_tags": [each[1 if is_nested else -1] for each in found]}
        yield f"{shard.path}:{sentence[0][0]}", columns


def _json_rows(shard: FileShard, _column: str | None) -> Iterator[tuple[object, Any]]:
    text = _everything(shard)
    first, _, rest = text.strip().partition("\n")
    if rest and not isinstance(_parsed(first), (Exception, NoneType)):
        # JSON lines under the name of JSON, as other libraries write them: a value with more behind it.
        yield from _json_lines(shard, None)
        return
    rows = _parsed(text)
    if isinstance(rows, Exception):
        raise _not_json(shard.path, rows)
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        yield f"{shard.path}, row {number}", row


def _parsed(text: str) -> Any:
    """The value of a text; the error of one that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return error


def _not_json(location: object, error: Exception) -> DataError:
    return DataError(
        f"{location} is not JSON",
        got=f"{error.doc.strip()[:60]!r} ({error})" if isinstance(error, json.JSONDecodeError) else error,
        expected="one JSON value a line in .jsonl, one list of rows in .json",
        fix="repair or remove it, or name a file of plain text .txt",
    )


def _table_rows(shard: FileShard, column: str | None) -> Iterator[tuple[object, Any]]:
    """The rows of a table, cells as texts, an empty one of which is not a value; or the cells of one column."""
    # The limit belongs to the process, and a document may well be longer than its 128 KiB.
    csv.field_size_limit(2**31 - 1)
    name, delimiter = str(shard.path), "\t" if format_of(shard.path) == ".tsv" else ","
    quoting = _quoting(shard) if delimiter == "\t" else csv.QUOTE_MINIMAL
    with (
        opened(shard.path) as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", errors=shard.encoding_errors, newline="") as text,
    ):
        lines, first = csv.reader(text, delimiter=delimiter, strict=True, quoting=quoting), 1
        try:
            header: list[str] = next(lines, [])
            at, first = _column_index(shard, header, column), lines.line_num + 1
            for cells in lines:
                location, first = f"{name}:{first}", lines.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{location} has the wrong number of cells",
                        got=len(cells),
                        expected=f"{len(header)}, as in the header",
                        fix="put cells that hold separators, quotes or line breaks in double quotes",
                    )
                if at is None:
                    yield location, {name: cell or None for name, cell in zip(header, cells, strict=True)}
                else:
                    yield location, cells[at]
        except csv.Error as error:
            expected, fix = f"cells between {delimiter!r}", 'close every quote; a quoted cell has "" for one'
            raise DataError(f"{name}:{first} is not a row of a table", got=error, expected=expected, fix=fix) from None
        except UnicodeDecodeError:
            # The reader decodes block by block without offsets; this raises the error again, with the offset.
            _everything(shard)


def _column_index(shard: FileShard, header: list[str], column: str | None) -> int | None:
    """Where a column stands; None for all columns, of which no two have one name."""
    if column in header:
        return header.index(column)
    if column is not None:
        raise missing_column(column, header, f"{shard.path}:1")
    twice = [name for number, name in enumerate(header) if name in header[:number]]
    if twice:
        raise DataError(f"{shard.path}:1 names a column twice", got=twice[0], expected="a name for each column")
    return None


def _quoting(shard: FileShard) -> Literal[0, 3]:
    """Whether quotes of a .tsv enclose cells. As in GLUE they are letters where every line has as many cells then, but
    enclosing would break or join lines: one that opens a cell and does not close it."""
    found: list[list[int]] = []
    for quoting in (csv.QUOTE_NONE, csv.QUOTE_MINIMAL):
        with opened(shard.path) as stream, io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="") as text:
            try:
                lines = csv.reader(text, delimiter="\t", strict=True, quoting=quoting)
                found.append([len(cells) for cells in lines if cells])
            except csv.Error:
                found.append([])
    plain, quoted = found
    return csv.QUOTE_NONE if len(set(plain)) == 1 and plain != quoted else csv.QUOTE_MINIMAL


def _parquet_rows(shard: FileShard, column: str | None) -> Iterator[tuple[object, Any]]:
    """The rows with this column, or with all."""
    with parquet_file(shard.path) as file:
        if column is not None and column not in file.schema_arrow.names:
            raise missing_column(column, file.schema_arrow.names, str(shard.path))
        batches = file.iter_batches(batch_size=1024, columns=None if column is None else [column])
        rows = (row for batch in batches for row in python_rows(batch))
        features = {} if column else schema_features(file.schema_arrow.metadata)
        name, is_json = str(shard.path), "Json" in str(features)
        for number, row in enumerate(rows, start=1):
            yield f"{name}, row {number}", with_json(row, features) if is_json else row


@contextmanager
def parquet_file(path: Path, metadata: Any = None) -> Iterator[Any]:
    """The open file, of which the metadata may be known. Raises DataError for a damaged one."""
    try:
        with _pyarrow().ParquetFile(path, metadata=metadata) as file:
            yield file
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}", got=error, expected="a whole Parquet file") from None


def row_file_shards(path: Path) -> list[FileShard]:
    """The shards of a file of rows. Raises DataError for a file of texts."""
    kind = format_of(path)
    if kind not in _ROWS:
        raise DataError(
            f"{path} holds texts, not rows", got=f"suffix {kind!r}", expected=" ".join(_ROWS), fix="write rows as jsonl"
        )
    return file_shards(path, column="", separator=None, encoding_errors="strict")


def _pyarrow() -> Any:
    return import_optional("pyarrow.parquet", needed_for="reading Parquet files", extra="transformers")


_TEXTS = (".txt", ".py", ".md")
_ROWS: dict[str, Callable[[FileShard, str | None], Iterator[tuple[object, Any]]]] = {
    ".jsonl": _json_lines,
    ".json": _json_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
    ".parquet": _parquet_rows,
    ".conll": _tagged_sentences,
}
