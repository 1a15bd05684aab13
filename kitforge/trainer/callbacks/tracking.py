"""Logs metrics to Weights & Biases; with WANDB_MODE=offline nothing leaves the machine."""

from __future__ import annotations

from typing import Any, final

from kitforge.foundation.errors import DependencyError
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


@final
class WandbCallback(Callback):
    """Logs every record to the project under its own step."""

    def __init__(self, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise DependencyError("wandb", needed_for="option trainer.wandb", extra="tracking") from error
        self._wandb = wandb
        self._project = project
        self._config = config

    def on_event(self, event: Event, run: RunContext) -> None:
        """Start, log, finish."""
        if event.kind == "start":
            name = None if run.folder is None else run.folder.name
            self._wandb.init(project=self._project, name=name, config=self._config, dir=run.folder)
        elif event.kind in ("log", "evaluate"):
            values = {name: value for name, value in event.record.items() if isinstance(value, (int, float))}
            self._wandb.log(values, step=run.state.cursor.step)
        elif event.kind == "table":
            table = self._wandb.Table(columns=event.record["columns"], data=event.record["rows"])
            self._wandb.log({event.record["name"]: table}, step=run.state.cursor.step)
        elif event.kind == "end":
            self._wandb.finish()
