"""Progress display: a live line on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kitforge.foundation.log import console
from kitforge.report.summary import metric_words
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

SECONDS_BETWEEN_LINES = 10.0


@final
class ProgressDisplay(Callback):
    """A progress bar with `progress_metrics`, learning rate and throughput; events and evaluations above it."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0

    def on_event(self, event: Event, run: RunContext) -> None:
        """Display the event."""
        if event.kind == "start" and console.is_terminal:
            self._start(run)
        elif event.kind == "log":
            self._show_log(event, run)
        elif event.kind == "evaluate":
            metrics = {name: value for name, value in event.record.items() if name.startswith("eval/")}
            words = "  ".join(f"{name} {value}" for name, value in metric_words(metrics))
            console.print(f"step {event.record['step']}  {words}", markup=False, highlight=False, soft_wrap=True)
        elif event.kind == "note":
            name, message = event.record["event"], event.record["message"]
            words = message if name == "run" else f"{name}: {message}"
            style = None if name == "run" else "yellow"
            console.print(words, markup=False, highlight=False, style=style, soft_wrap=name == "run")
        elif event.kind == "end" and self._bar is not None:
            self._bar.stop()

    def _start(self, run: RunContext) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=run.max_steps, completed=run.state.cursor.step)
        self._bar.start()

    def _show_log(self, event: Event, run: RunContext) -> None:
        record = event.record
        figures = [f"{name} {record[name]:.4f}" for name in run.progress_metrics if name in record]
        rate = f"lr {record.get('learning_rate', math.nan):.2e}"
        words = "  ".join([*figures, rate, _throughput(record)])
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record["step"], description=words)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or record["step"] == run.max_steps:
            self._last_line = time.monotonic()
            console.print(
                f"step {record['step']}/{run.max_steps}  {words}", markup=False, highlight=False, soft_wrap=True
            )


def _throughput(record: Mapping[str, Any]) -> str:
    """Tokens or samples per second; trained tokens in parentheses if fewer than the input tokens."""
    rates = {name: record.get(f"time/{name}_per_second", 0.0) for name in ("input_tokens", "tokens", "samples")}
    if rates["input_tokens"]:
        trained = f" ({rates['tokens']:,.0f} trained)" if rates["tokens"] else ""
        return f"{rates['input_tokens']:,.0f} tokens/s{trained}"
    return f"{rates['tokens']:,.0f} tokens/s" if rates["tokens"] else f"{rates['samples']:,.0f} samples/s"
