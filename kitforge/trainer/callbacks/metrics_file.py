"""Writes metrics.jsonl: one JSON object per line, flushed at once, truncated to the checkpoint on resume."""

import json
import math
from pathlib import Path

from kitforge.foundation.files import write_text
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


class MetricsFile(Callback):
    """Appends every log line, evaluation and note to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start":
            is_fresh = run.state.cursor.step == 0 and run.state.last_eval_step is None
            _truncate_after(self.path, -1 if is_fresh else run.state.cursor.step)
        if event.record and event.kind != "table":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # JSON has no infinity and no NaN; both become null.
            numbers = {name: value for name, value in event.record.items() if isinstance(value, float)}
            null = dict.fromkeys(name for name, value in numbers.items() if not math.isfinite(value))
            line = json.dumps({**event.record, **null})
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")


def _truncate_after(path: Path, step: int) -> None:
    """Drop the lines after `step`, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("step", 0) <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
