"""Atomic files and folders: written to a draft, synced to disk, renamed into place. Locks and checksums."""

import difflib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from kitforge.foundation.errors import ConfigError, DataError

# The file that says what of its folder a command made: the folder as a whole, or some of its files.
MARK = ".kitforge"


@cache
def machine_name() -> str:
    """Eight hexadecimal digits for the scope of process ids: the host, its boot, and the container."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def process_name() -> str:
    """A name unique among running processes of all machines, for files on a shared volume."""
    return f"{machine_name()}-{os.getpid()}"


def user_path(given: str | os.PathLike[str]) -> Path:
    """A path with `~` and `~user` replaced by those home folders. Raises ConfigError for a user that does not exist,
    unless a file has that name."""
    path = os.path.expanduser(given)
    if path.startswith("~") and not os.path.lexists(path):
        fix = f"write the whole path: {os.path.join(os.getcwd(), path)}"
        raise ConfigError("this path begins with a user who is not known", got=given, expected="~/ or ~USER/", fix=fix)
    return Path(path)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file to write to. It appears at `path` when the block succeeds, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{process_name()}.draft")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_file(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A draft folder to fill. It replaces `path` when the block succeeds, and is deleted otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{process_name()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        sync_folder(draft)
        if path.exists():
            old = path.with_name(f".{path.name}.{process_name()}.old")
            os.replace(path, old)
            os.replace(draft, path)
            # The new folder is on disk before the old one is deleted.
            sync_folder(path.parent)
            shutil.rmtree(old)
        else:
            os.replace(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(path.parent)


def check_own(path: Path, maker: str, *, overwrite: bool, names: Collection[str] = ()) -> None:
    """Raise ConfigError for a file, or for a folder with content, of these `names` alone if there are any, unless
    `mark_own` marked it for that maker."""
    is_used = (
        any(each.name in names or not names for each in path.iterdir())
        if path.is_dir()
        else path.exists() and path.stat().st_size > 0
    )
    if not is_used or overwrite:
        return
    mark, _, line = _mark_of(path, maker)
    if line not in _marks(mark):
        kind = "folder is not empty" if path.is_dir() else "file exists"
        fix = "choose another place, move it away, or say overwrite=true (save_model: overwrite=True)"
        raise ConfigError(f"the {kind}, and was not written by {maker}", got=path, expected="a new place", fix=fix)


def mark_own(path: Path, maker: str) -> None:
    """Note that `maker` made what is at `path`, so that the same command may replace it."""
    mark, name, line = _mark_of(path, maker)
    others = [each for each in _marks(mark) if each.split("\t")[0] != name]
    write_text(mark, "\n".join([*others, line, ""]))


def _mark_of(path: Path, maker: str) -> tuple[Path, str, str]:
    """Where the mark of an output is, its name there, and its line. A file that was written to since is not ours."""
    if path.is_dir():
        return path / MARK, ".", f".\t{maker}"
    return path.parent / MARK, path.name, f"{path.name}\t{maker}\t{path.stat().st_mtime_ns}"


def _marks(mark: Path) -> list[str]:
    return mark.read_text("utf-8").splitlines() if mark.is_file() else []


@contextmanager
def file_lock(folder: Path, log: logging.Logger, work: str) -> Iterator[None]:
    """An exclusive lock among processes. If another one holds it, logs that it is doing the `work`."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is %s %s; waiting for it", work, folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Keep a folder from other runs, of this process too, until the block or the process ends. Raises ConfigError where
    another run holds it; on a file system without locks nobody does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        fix = "wait for its end, or choose another output_dir"
        raise ConfigError("another run is writing to this folder", got=folder, expected="one run", fix=fix) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)


def missing_file_error(
    path: Path, words: Iterable[str] = (), *, expected: str = "a file, a folder or a pattern"
) -> DataError:
    """The error for a path that does not exist. It names the closest file, or the closest of `words`."""
    name, folder = path.name, path.parent
    while not folder.is_dir():
        name, folder = folder.name, folder.parent
    present, words = sorted(os.listdir(folder)), list(words)
    close = difflib.get_close_matches(name, [*present, *words], n=1, cutoff=0.5)
    fix = f"{folder} holds {', '.join(present[:8]) or 'nothing'}"
    if close:
        fix = f"did you mean {close[0] if close[0] in words else folder / close[0]}?"
    return DataError(f"{path} does not exist", got=path.absolute(), expected=expected, fix=fix)


def sync_folder(path: Path) -> None:
    """Make renames within `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
