"""Logs metrics to Weights & Biases, where with WANDB_MODE=offline nothing leaves the machine, and to TensorBoard."""

from functools import partial
from pathlib import Path
from typing import Any

from kitforge.foundation.errors import DependencyError
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


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
            self._wandb.finish(exit_code=int(not event.is_clean))


class TensorBoardCallback(Callback):
    """Writes every number under its own step into `folder`, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise DependencyError("tensorboard", needed_for="option trainer.tensorboard", extra="tracking") from error
        self._open = partial(SummaryWriter, str(folder))
        self._writer: SummaryWriter | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        """Start, log, finish. A resumed run hides what was written after its checkpoint."""
        step = run.state.cursor.step
        if event.kind == "start":
            self._writer = self._open(purge_step=step + 1 if step else None)
        elif self._writer is not None and event.kind in ("log", "evaluate"):
            for name, value in event.record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()
        elif self._writer is not None and event.kind == "end":
            self._writer.close()
