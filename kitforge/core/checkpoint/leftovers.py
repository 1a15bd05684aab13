"""What an interrupted process leaves beside the checkpoints, and how it is put right.

Names are those of `foundation.files.atomic_folder`: `.step_3.<process>.draft` was being written and
`.step_3.<process>.old` was being replaced. Two are ours: `.step_3.<process>.trash`, a folder on its way out, renamed
first so that no published folder is ever half deleted, and `.step_3.<process>.parts`, what ranks write for torch's
planner before the draft is made of it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"\.(?P<place>step_\d+|export)\.(?P<process>\d+)\.(?P<what>draft|old|trash|parts)")


def restore(root: Path) -> None:
    """Put back each folder whose process died after it was moved aside and before its successor took the place."""
    for path, place in _dead(root, "old"):
        if not place.exists():
            os.replace(path, place)


def clean(root: Path) -> None:
    """Restore what can be, and delete the other leftovers of processes that are gone."""
    restore(root)
    for what in ("draft", "old", "trash", "parts"):
        for path, _ in _dead(root, what):
            shutil.rmtree(path)


def set_aside(folder: Path) -> Path:
    """Take a published folder out of sight in one rename; returns where it now waits to be deleted."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.trash")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def _dead(root: Path, what: str) -> Iterator[tuple[Path, Path]]:
    """Each leftover of that sort whose process is gone, and the place it belongs to."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and match["what"] == what and path.is_dir() and not _is_other_process(int(match["process"])):
            yield path, root / match["place"]


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
