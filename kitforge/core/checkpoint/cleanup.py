"""Cleanup of what interrupted processes left next to the checkpoints.

Names are those of `foundation.files.atomic_folder`: `.step_3.<process>.draft` was being written and
`.step_3.<process>.old` was being replaced. Two are ours: `.step_3.<process>.trash`, a folder on its way out, renamed
first so that no published folder is ever half deleted, and `.step_3.<process>.parts`, what ranks write for torch's
planner before the draft is made of it.

A process is `<machine>-<number>`. Whether it has ended is known only on the same machine, boot and container. Another
one may be alive, so its leftovers on a shared volume are deleted when nothing in them has changed
for a day.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kitforge.foundation.files import machine_name, process_name

# Seconds without a change after which leftovers of a process on another machine are considered stale.
STALE_SECONDS = 24 * 3600.0
# Seconds within which a living process puts a folder in the place of one that it has moved aside.
REPLACING = 1.0
_NAME = re.compile(
    r"\.(?P<place>step_\d+|export)\.(?:(?P<machine>[0-9a-f]+)-)?(?P<number>\d+)\.(?P<what>draft|old|trash|parts)"
)


def restore_folders(root: Path) -> None:
    """Restore folders whose process died between moving the old one aside and publishing its successor."""
    for path, found in _stale_paths(root, "old"):
        original = root / found["place"]
        if original.exists():
            continue
        if _is_foreign(found):
            # Its process may be alive, and about to take the place.
            time.sleep(REPLACING)
        elif _is_other_process(int(found["number"])):
            continue
        # Another process may restore it at the same moment.
        with suppress(FileNotFoundError):
            if not original.exists():
                os.replace(path, original)


def clean(root: Path) -> None:
    """Restore folders, and delete the other leftovers of dead processes."""
    restore_folders(root)
    for what in ("draft", "old", "trash", "parts"):
        for path, found in _stale_paths(root, what):
            is_alive = _is_in_use(path) if _is_foreign(found) else _is_other_process(int(found["number"]))
            if not is_alive:
                shutil.rmtree(path)


def set_aside(folder: Path) -> Path:
    """Rename a published folder for deletion; returns its new path."""
    aside = folder.with_name(f".{folder.name}.{process_name()}.trash")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def _stale_paths(root: Path, what: str) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and match["what"] == what and path.is_dir():
            yield path, match


def _is_foreign(found: re.Match[str]) -> bool:
    """Whether it is of another machine, boot or container, where process numbers are others."""
    return found["machine"] != machine_name()


def _is_in_use(path: Path) -> bool:
    """Whether anything in the folder, or its name, has changed within a day; clocks of machines differ by less."""
    try:
        newest = max(each.lstat().st_ctime for each in (path, *path.rglob("*")))
    except FileNotFoundError:
        # It changes while it is looked at.
        return True
    return time.time() - newest < STALE_SECONDS


def _is_other_process(number: int) -> bool:
    """Whether a process other than this one has that number. In a container a restarted process has its old number."""
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
