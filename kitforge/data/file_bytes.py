"""Files that rows and documents are read from: their bytes unpacked, the suffix of their format, and their stamps."""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from kitforge.foundation.errors import DataError

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
