"""Paths to files: a file, a folder or a glob pattern, for text and tables alike."""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

from kitforge.foundation.errors import DataError
from kitforge.foundation.files import missing_file_error, user_path

# The folder of rows without a value.
_NOTHING = "__HIVE_DEFAULT_PARTITION__"


def resolve_files(
    spec: str | os.PathLike[str],
    is_known: Callable[[Path], bool],
    known: str,
    names: Sequence[str] = (),
    is_hidden: Callable[[str], bool] = lambda part: part.startswith("."),
) -> list[Path]:
    """The files of a path or a glob pattern, in the order of reading. Of a folder: the files at any depth for which
    `is_known`, without those below names that are hidden, sorted by relative path. `known` lists the suffixes and
    `names` further valid values, for messages. Raises DataError if there is no file."""
    path = user_path(spec)
    if path.is_dir():
        below = {each.relative_to(path).as_posix(): each for each in path.rglob("*") if is_known(each)}
        shown = (name for name in sorted(below) if not any(map(is_hidden, name.split("/"))))
        if files := [below[name] for name in shown if below[name].is_file()]:
            return files
        got = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise DataError(f"the folder {path} holds no readable files", got=got, expected=f"{known}, at any depth")
    if path.is_file():
        return [path]
    if path.exists():
        raise DataError(f"cannot read {path}", got="neither a file nor a folder", expected="a file or a folder")
    if glob.has_magic(str(path)):
        base, found = _fixed(path), sorted(map(Path, glob.glob(str(path), recursive=True)))
        hidden = {part for each in found for part in each.relative_to(base).parts if is_hidden(part)}
        # What the pattern itself names so is not hidden: _delta_log, _*.csv.
        named = [part for part in path.relative_to(base).parts if is_hidden(part)]
        hidden -= {part for part in hidden if any(fnmatch(part, own) for own in named)}
        if files := [each for each in found if each.is_file() and hidden.isdisjoint(each.relative_to(base).parts)]:
            return files
        fix = "name what begins with _ in the pattern" if found else "check the pattern, and quote it in a shell"
        raise DataError(f"no file matches {path}", got=f"in {Path.cwd()}", fix=fix)
    raise missing_file_error(path, list(names))


def _fixed(path: Path) -> Path:
    """What a pattern begins with, before its first part that matches several names."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))


def folder_values(spec: str | os.PathLike[str], file: Path) -> Mapping[str, str | None]:
    """What the folders between a folder, or what a pattern begins with, and one of its files say, as Hive names them
    (`country=de`); None for no value."""
    base = _fixed(user_path(spec))
    found = (re.fullmatch(r"([^=]+)=(.*)", part) for part in file.relative_to(base).parts[:-1] if file != base)
    return {unquote(each[1]): None if each[2] == _NOTHING else unquote(each[2]) for each in found if each is not None}
