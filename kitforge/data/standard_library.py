"""The corpus that every machine has: the sources of the running interpreter's own standard library."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kitforge.data.document_shard import SHARD_BYTES, fingerprint_of
from kitforge.foundation.errors import DataError

# Other people's packages, and what differs from machine to machine or is not prose of a programmer.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardLibraryShard:
    """Some of the interpreter's source files, a document each; a file that is not UTF-8 is always left out."""

    folder: Path
    # Path below the folder and size in bytes, in the order of reading.
    files: tuple[tuple[str, int], ...]

    @property
    def fingerprint(self) -> str:
        """A hash of names, sizes and the interpreter's version, independent of Python's location."""
        return fingerprint_of("python_stdlib", platform.python_implementation(), platform.python_version(), self.files)

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(size for _, size in self.files)

    def documents(self) -> Iterator[str]:
        """The text of every file."""
        for name, _ in self.files:
            try:
                yield (self.folder / name).read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            except OSError as error:
                raise DataError(f"cannot read {self.folder / name}", got=error.strerror) from None


def standard_library_shards() -> list[StandardLibraryShard]:
    """The source files of Python's standard library, in shards of equal size."""
    folder = Path(sysconfig.get_path("stdlib"))
    shards: list[StandardLibraryShard] = []
    files: list[tuple[str, int]] = []
    for name in sorted(_source_files(folder)):
        size = (folder / name).stat().st_size
        if size > 0:
            files.append((name, size))
        if sum(size for _, size in files) >= SHARD_BYTES:
            shards.append(StandardLibraryShard(folder=folder, files=tuple(files)))
            files = []
    if files:
        shards.append(StandardLibraryShard(folder=folder, files=tuple(files)))
    if not shards:
        raise DataError(
            "this Python has no sources of its standard library",
            got=folder,
            expected="a folder of .py files",
            fix="name a corpus of your own: data.train=FILE",
        )
    return shards


def _source_files(folder: Path) -> Iterator[str]:
    """Paths below the folder; excluded folders are not entered, since there may be many packages."""
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(directory, name).relative_to(folder).as_posix() for name in names if name.endswith(".py"))
