"""Shards of a corpus, and how a row becomes a document."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol

from kitforge.data.features import Features
from kitforge.foundation.errors import DataError, nearest

EncodingErrors = Literal["strict", "replace", "ignore"]

# Fixed, so that a corpus has the same shards on every machine; small enough to fit in memory many times.
SHARD_BYTES = 2 * 2**20


class DataShard(Protocol):
    """A part of a data set that one process can read alone. Implementations can be sent to another process."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the contents may have changed."""

    @property
    def size(self) -> int:
        """Roughly how many bytes are read; measures progress and decides whether processes pay."""


class DocumentShard(DataShard, Protocol):
    """A part of a corpus."""

    def documents(self) -> Iterable[str]:
        """The documents in a fixed order, without the empty ones."""


class RecordShard(DataShard, Protocol):
    """A part of the rows of a data set."""

    @property
    def features(self) -> Features:
        """What is said of the columns."""

    def rows(self) -> Iterator[tuple[object, Any]]:
        """Every row in a fixed order with its location, which is formatted only for messages."""


def fingerprint_of(*parts: object) -> str:
    """A hexadecimal fingerprint of the parts' representations."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def documents_of(rows: Iterable[tuple[object, Any]], column: str, errors: EncodingErrors) -> Iterator[str]:
    """The documents of rows with their locations, without the empty ones."""
    for location, row in rows:
        if text := document_of(row, column, errors, location):
            yield text


def document_of(row: object, column: str, errors: EncodingErrors, location: object, option: str = "data.column") -> str:
    """The text of a row, which is the text itself or a mapping with the column `column`, chosen by `option`.

    `place` tells a person, as text, where the row stands; it is made into text only for a message.
    """
    # To ask an abstract class of every row costs a tenth of the time of reading.
    if type(row) is dict or (type(row) is not str and isinstance(row, Mapping)):
        if column not in row:
            raise missing_column(column, map(str, row), location, option)
        row = row[column]
    if isinstance(row, str):
        return row if row.isascii() else _encodable(row, errors, location)
    raise DataError(
        f"{location} holds no text in column {column!r}",
        got=f"{type(row).__name__} {str(row)[:60]!r}",
        expected="text",
        fix=f"choose a column that holds text ({option}=NAME), or leave such rows out of the data",
    )


def column_value(row: object, column: str, location: object, option: str) -> Any:
    """The value of a column of a row, chosen by `option`; of arrays and tensors the numbers. Raises DataError where it
    has none."""
    if not isinstance(row, Mapping) or column not in row:
        raise missing_column(column, map(str, row if isinstance(row, Mapping) else ()), location, option)
    return python_value(row[column])


def python_value(value: Any) -> Any:
    """The value as Python objects: arrays, tensors and their numbers too."""
    if isinstance(value, (list, tuple)):
        return [python_value(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def missing_column(column: str, columns: Iterable[str], location: object, option: str = "data.column") -> DataError:
    """The error about rows without the column that was asked for."""
    present = sorted(columns)
    fix = f"{option}=NAME; {nearest(column, present)}" if present else f"{option}=NAME"
    return DataError(
        f"{location} has no column {column!r}",
        got=f"columns {', '.join(present)}",
        expected=f"a column {column!r}",
        fix=fix,
    )


def _encodable(text: str, errors: EncodingErrors, location: object) -> str:
    """JSON may spell half of a surrogate pair, which is a Python string but no text that has UTF-8 bytes."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        if errors != "strict":
            return text.encode("utf-8", "surrogatepass").decode("utf-8", errors)
        raise DataError(
            f"{location} holds half of a surrogate pair, which no encoding can write",
            got=f"U+{ord(text[error.start]):04X} at character {error.start}",
            expected="text that UTF-8 can hold (data.encoding_errors=strict)",
            fix="repair the row, or data.encoding_errors=replace (marks it with U+FFFD) or ignore (leaves it out)",
        ) from None
