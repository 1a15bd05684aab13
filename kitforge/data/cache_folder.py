"""A cache folder: files that are built once and memory-mapped.

Its manifest is written last and makes the rest valid. A lock that the system releases when its holder dies lets one
process build while others wait for it; what one that was killed has left is there for the next to go on from.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.foundation.files import file_lock, user_path, write_text
from kitforge.foundation.log import logger
from kitforge.foundation.untrusted import parse_json

_log = logger(__name__)


def default_root() -> Path:
    """The folder that holds all caches: $KITFORGE_CACHE or ~/.cache/kitforge."""
    return user_path(os.environ.get("KITFORGE_CACHE") or "~/.cache/kitforge")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder:
    """The folder of a cache and its log messages."""

    path: Path
    what: str  # for messages: "token cache"
    manifest_name: str
    format: int
    elsewhere: str  # how another place is chosen

    def build(self, fill: Callable[[], dict[str, Any]]) -> None:
        """Unless it is built already, let `fill` write the files and give what the manifest says about them.

        It runs in one process at a time and may find what an earlier one left. Raises DataError for what is wrong with
        the disk, and whatever `fill` raises.
        """
        try:
            if (self.path / self.manifest_name).exists():
                return
            self.path.mkdir(parents=True, exist_ok=True)
            with file_lock(self.path, _log, f"building the {self.what}"):
                # The previous owner of the lock may have built it.
                if not (self.path / self.manifest_name).exists():
                    for draft in self.path.rglob(".*.draft"):
                        draft.unlink(missing_ok=True)
                    manifest = {"format": self.format, **fill()}
                    write_text(self.path / self.manifest_name, json.dumps(manifest, indent=1))
        except OSError as error:
            raise DataError(
                f"cannot write the {self.what} {self.path}",
                got=error.strerror or error,
                fix=f"free some room, or choose another place{self.elsewhere}",
            ) from None

    def manifest(self) -> dict[str, Any]:
        """What `fill` gave. Raises DataError when the cache is missing, damaged or of another format."""
        try:
            manifest = parse_json((self.path / self.manifest_name).read_bytes())
        except (OSError, ValueError) as error:
            raise self.damaged(self.manifest_name, error, "the JSON that ends a finished cache") from None
        if not isinstance(manifest, dict) or manifest.get("format") != self.format:
            raise self.damaged(self.manifest_name, str(manifest)[:60], f"format {self.format}")
        return manifest

    def mapped(self, name: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """The array that is all of a file. Raises DataError when the file is not of that size."""
        path, expected = self.path / name, int(np.prod(shape)) * np.dtype(dtype).itemsize
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            raise self.damaged(name, "no file" if size is None else f"{size} bytes", f"{expected} bytes")
        return np.memmap(path, dtype=dtype, mode="r", shape=shape) if expected else np.zeros(shape, dtype)

    def damaged(self, name: str, got: object, expected: str) -> DataError:
        """The error about one of its files."""
        return DataError(
            f"the {self.what} file {self.path / name} is damaged",
            got=got,
            expected=expected,
            fix=f"delete the folder {self.path}; it is built anew",
        )
