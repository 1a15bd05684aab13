"""A user's own network with their own loss: the straight line y = 3 x - 1 through a task of ten lines."""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from kitforge.api import Trainer
from kitforge.core.parallel.world import World
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.callbacks.callback import Callback, Event
from kitforge.trainer.callbacks.callback import RunContext as WatchedRun
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import Task


class Regression(Task):
    """Squared error of a linear layer on batches of eight points, which are a function of the step.

    Steps in `broken`, counted from 1, hold a number that is not one.
    """

    def __init__(self, dropout: float = 0.0, broken: Collection[int] = ()) -> None:
        self.dropout, self.broken = dropout, broken

    def build(self, world: World) -> nn.Module:
        return nn.Sequential(nn.Dropout(self.dropout), nn.Linear(1, 1)).to(world.device)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 10_000):
            inputs = torch.randn(8, 1, generator=torch.Generator().manual_seed(step))
            targets = 3 * inputs - 1
            yield [{"inputs": inputs, "targets": targets * math.nan if step + 1 in self.broken else targets}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        error: Tensor = model(micro_batch["inputs"]) - micro_batch["targets"]
        return {"loss": (error**2).sum()}


def train(
    folder: Path | None,
    task: Task | None = None,
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    **choices: Any,
) -> Run:
    """Train a straight line; `choices` are options of trainer.*, `rate`, and `precision`."""
    options: dict[str, Any] = {
        "device": "cpu",
        "precision": choices.pop("precision", "fp32"),
        "optimizer": {"name": "adamw", "learning_rate": choices.pop("rate", 0.1), "weight_decay": 0.0},
        "trainer": {"max_steps": 6, "progress": False, "checkpoint_every": 1, "save_total_limit": 100} | choices,
    }
    return Trainer(task or Regression(), output_dir=folder, options=options, callbacks=callbacks).train(resume)


@final
class Recorder(Callback):
    """Keeps weights, optimizer and learning rate after every step."""

    def __init__(self) -> None:
        self.weights: dict[int, list[Tensor]] = {}
        self.optimizer: dict[int, list[Tensor]] = {}
        self.updates: dict[int, int] = {}
        self.scales: dict[int, float] = {}

    def on_event(self, event: Event, run: WatchedRun) -> None:
        if event.kind == "step":
            state, step = run.state, run.state.cursor.step
            self.weights[step] = [parameter.detach().clone() for parameter in run.model.parameters()]
            self.optimizer[step] = [tensor.clone() for _, tensor in state.optimizer.tensors()]
            self.updates[step], self.scales[step] = state.updates, state.scaler.scale
