"""Files that rows and documents are read from: their bytes unpacked, the suffix of their format, and their stamps."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from kitforge.foundation.errors import DataError

# The rows of a table's chunk follow from this; half-built column caches count in chunks, so a change asks for another
# FORMAT of theirs.
_BLOCK_BYTES = 2**21
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # what some editors put at a file's head
# Size in bytes, and in nanoseconds the times of change of the bytes, which anyone can set, and of the file's entry,
# which only the system does.
FileStamp: TypeAlias = tuple[int, int, int]


def is_packed(path: Path) -> bool:
    """Whether the file is compressed, by its name."""
    return path.suffix.lower() == ".gz"


def format_suffix(path: Path) -> str:
    """The suffix of the format: ".jsonl" for `a.jsonl.gz`; empty without one."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[:-1][-1:] if is_packed(path) else suffixes[-1:])


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed. Raises DataError for a damaged file."""
    try:
        with gzip.open(path) if is_packed(path) else open(path, "rb") as stream:
            yield stream  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"cannot read {path}", got=error, fix="check the file's permissions and that it is complete"
        ) from None


def stamp_of(path: Path) -> FileStamp:
    """What changes with a file. Raises DataError for one that cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read {path}", got=error.strerror) from None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_unchanged(path: Path, stamp: FileStamp, whole: str) -> None:
    """Raise DataError when the file is no longer the one that had this stamp when the `whole` was opened."""
    # A new name or other rights change the entry and no byte.
    if stamp_of(path)[:2] != stamp[:2]:
        raise DataError(f"{path} has changed since the {whole} was opened", fix="run the command again")


def text_blocks(
    path: Path, *, has_quotes: bool = False, start: int = 0, stop: int | None = None, longest: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Whole records of a file, or of a range of its bytes, with the number of the first line, from 1. Raises DataError
    for a record of more than `longest` bytes, and for a quote that is never closed."""
    line, remaining, position = 1, b"", start
    with opened(path) as stream:
        stream.seek(start)
        # Blocks grow with an unfinished record, or a very long one would be searched again for every block.
        while block := stream.read(max(_BLOCK_BYTES, len(remaining)) if stop is None else stop - position):
            remaining += block.removeprefix(BYTE_ORDER_MARK) if position == 0 else block
            position += len(block)
            cut = _last_record(remaining) if has_quotes and b'"' in remaining else remaining.rfind(b"\n") + 1
            if cut:
                yield line, remaining[:cut]
                line, remaining = line + remaining.count(b"\n", 0, cut), remaining[cut:]
            if longest is not None and len(remaining) > longest:
                raise DataError(
                    f"{path}:{line} begins a record that does not end",
                    got=f"more than {longest // 2**20} MiB",
                    expected="a line break outside of quotes",
                    fix="look for a double quote that is never closed",
                )
    if remaining.strip(b"\r\n"):
        if has_quotes and remaining.count(b'"') % 2:
            raise DataError(f"{path}:{line} and what follows has a quote that is never closed", got=remaining[:60])
        yield line, remaining


def _last_record(raw: bytes) -> int:
    """Where the last line break is that no quotes enclose, and behind it; 0 where there is none."""
    cut, quotes = raw.rfind(b"\n") + 1, raw.count(b'"')
    if cut:
        quotes -= raw.count(b'"', cut)
    while cut and quotes % 2:
        before = raw.rfind(b"\n", 0, cut - 1) + 1
        quotes -= raw.count(b'"', before, cut)
        cut = before
    return cut


def json_lines(raw: bytes, line: int, errors: str = "strict") -> Iterator[tuple[int, Any]]:
    """What the lines that are not empty hold, with their numbers; the error of a line that is not JSON."""
    for number, text in enumerate(raw.split(b"\n"), start=line):
        if not text.strip():
            continue
        try:
            # Half a surrogate pair is left in; who reads texts decides how it is handled.
            yield number, json.loads(text.decode("utf-8", errors))
        except (ValueError, RecursionError) as error:
            yield number, error
