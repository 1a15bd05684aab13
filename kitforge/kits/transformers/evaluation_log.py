"""The log of a benchmark evaluation: paths and writing of its rows."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitforge.foundation.files import atomic_file, check_own, user_path
from kitforge.foundation.log import logger

_log = logger(__name__)


def log_files(
    checkpoint: Path, output: str | None, tasks: Sequence[str], *, overwrite: bool = False
) -> dict[str, Path]:
    """The log file of each task: `output` for all, else RUN/evaluation/[STEP/]TASK.jsonl. Empty for a model outside of
    a run.

    Raises ConfigError if `output` exists, without `overwrite`.
    """
    if output is not None:
        target = user_path(output)
        check_own(target, "evaluate", overwrite=overwrite)
        return dict.fromkeys(tasks, target)
    location = checkpoint.resolve()
    is_step = location.parent.name == "checkpoints"
    run = location.parent.parent if is_step else location
    if not (run / "config.yaml").is_file():
        return {}
    if not os.access(run, os.W_OK):
        _log.warning("%s cannot be written to, so the rows are not logged; output=FILE writes them elsewhere", run)
        return {}
    folder = run / "evaluation" / location.name if is_step else run / "evaluation"
    return {task: folder / f"{task}.jsonl" for task in tasks}


def write_log(files: Mapping[str, Path], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the rows of every task to its file, one JSON object per line."""
    lines: dict[Path, list[bytes]] = {}
    for task, path in files.items():
        lines.setdefault(path, []).extend(
            json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in rows[task]
        )
    for path, content in lines.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.writelines(content)
