"""Paths to files: a file, a folder or a glob pattern, for text and tables alike."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kitforge.foundation.errors import DataError
from kitforge.foundation.files import missing_file_error


def resolve_files(
    spec: str | os.PathLike[str], is_known: Callable[[Path], bool], known: str, names: Sequence[str] = ()
) -> list[Path]:
    """The files of a path or a glob pattern, in the order of reading. Of a folder: the files at any depth for which
    `is_known`, without hidden ones, sorted by relative path. `known` lists the suffixes and `names` further valid
    values, for messages. Raises DataError if there is no file."""
    path = Path(spec).expanduser()
    if path.is_dir():
        below = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if is_known(each)}
        shown = (name for name in sorted(below) if not any(part.startswith(".") for part in name.split("/")))
        if files := [below[name] for name in shown if below[name].is_file()]:
            return files
        got = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise DataError(f"the folder {path} holds no readable files", got=got, expected=f"{known}, at any depth")
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"cannot read {path}", got="neither a file nor a folder", expected="a file or a folder")
    if glob.has_magic(str(path)):
        if files := sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()):
            return files
        fix = "check the pattern, and quote it in a shell"
        raise DataError(f"no file matches {path}", got=f"in {Path.cwd()}", fix=fix)
    raise missing_file_error(path, list(names))
