"""Progress display: a live line on a terminal, otherwise a line every few seconds, which a notebook rewrites."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kitforge.foundation.log import console
from kitforge.foundation.progress import show_line
from kitforge.report.summary import metric_words
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

SECONDS_BETWEEN_LINES = 10.0
# Columns of the bar; it is shorter only where the first figure would not fit.
_SHORTEST_BAR = 10


class ProgressDisplay(Callback):
    """A progress bar with `progress_metrics`, learning rate and throughput; events and evaluations above it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start" and console.is_terminal:
            self._start(run)
        elif event.kind == "log":
            self._show_log(event, run)
        elif event.kind == "evaluate":
            metrics = {name: value for name, value in event.record.items() if name.startswith("eval/")}
            words = "  ".join(f"{name} {value}" for name, value in metric_words(metrics, run.options.metric_for_best))
            console.print(f"step {event.record['step']}  {words}", markup=False, highlight=False, soft_wrap=True)
        elif event.kind == "note":
            name, message = event.record["event"], event.record["message"]
            words = message if name == "run" else f"{name}: {message}"
            style = None if name == "run" else "yellow"
            console.print(words, markup=False, highlight=False, style=style, soft_wrap=name == "run")
        elif event.kind == "end" and self._progress is not None:
            self._progress.stop()

    def _start(self, run: RunContext) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=run.max_steps, completed=run.state.cursor.step)
        self._progress.start()

    def _show_log(self, event: Event, run: RunContext) -> None:
        record = event.record
        figures = [f"{name} {record[name]:.4f}" for name in run.progress_metrics if name in record]
        figures += [f"lr {record.get('learning_rate', math.nan):.2e}", _throughput(record)]
        words = "  ".join(figures)
        if self._progress is not None and self._task is not None:
            # Two clocks of "0:00:00", or "1 day, 0:00:00", and a space beside each column.
            clock = max(8, len(str(timedelta(seconds=int(run.state.seconds)))))
            free = console.width - len(f"step {run.max_steps}/{run.max_steps}") - 2 * clock - 4
            words = fitting(figures, free - _SHORTEST_BAR)
            self._progress.update(self._task, completed=record["step"], description=words)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or record["step"] == run.max_steps:
            self._last_line = time.monotonic()
            show_line(f"step {record['step']}/{run.max_steps}  {words}", console)


def fitting(figures: Sequence[str], width: int) -> str:
    """The figures, the most important one first, as far as they fit; the first one always."""
    while len(figures) > 1 and len("  ".join(figures)) > width:
        figures = figures[:-1]
    return "  ".join(figures)


def _throughput(record: Mapping[str, Any]) -> str:
    """Tokens or samples per second; trained tokens in parentheses if fewer than the input tokens."""
    rates = {name: record.get(f"time/{name}_per_second", 0.0) for name in ("input_tokens", "tokens", "samples")}
    if rates["input_tokens"]:
        trained = f" ({rates['tokens']:,.0f} trained)" if rates["tokens"] else ""
        return f"{rates['input_tokens']:,.0f} tokens/s{trained}"
    return f"{rates['tokens']:,.0f} tokens/s" if rates["tokens"] else f"{rates['samples']:,.0f} samples/s"
