"""A step that builds on others made into one that holds everything itself."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from kitforge.core.checkpoint.layout import KEEP, steps, write_manifest
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.table_files import TableFiles
from kitforge.core.checkpoint.tables import Step, base_of
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import atomic_folder


def compact(folder: Path, target: Path | None = None) -> None:
    """Write the step in `folder` whole, in its own place or as `target`, which appears whole or not at all.

    Raises CheckpointError when another step builds on the one that would be replaced.
    """
    target = folder if target is None else target
    checkpoint = open_checkpoint(folder)
    if target == folder:
        _refuse_foundation(folder, checkpoint.step)
    step = Step(folder=folder, manifest=checkpoint.manifest)
    others = [file for file in step.manifest.files if file.name not in step.table_files()]
    with atomic_folder(target) as draft:
        for name in (*(file.name for file in others), *([KEEP] if (folder / KEEP).exists() else [])):
            _link(folder / name, draft / name)
        files = TableFiles(draft, step.manifest.step)
        files.write({name: checkpoint.table(name) for name in checkpoint.tables})
        manifest = replace(step.manifest, files=(*others, *files.files), tables=tuple(files.tables), base=None)
        write_manifest(draft, manifest)


def _refuse_foundation(folder: Path, step: int) -> None:
    for later in steps(folder.parent):
        if step == base_of(folder.parent, later):
            raise CheckpointError(
                f"{folder} cannot be replaced, since step_{later} builds on it",
                fix=f"compact step_{later}, or write to another folder",
            )


def _link(source: Path, target: Path) -> None:
    """Files of a step never change, so that two names for one serve; where there are no links, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
