"""A user's own network with their own loss: the straight line y = 3 x - 1 through a task of ten lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.api import Trainer
from kitforge.foundation.types import Cursor, MicroBatch, Sums, World
from kitforge.trainer.run import Run
from kitforge.trainer.task import Task


class Regression(Task):
    """Squared error of a linear layer on batches of eight points, which are a function of the step."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def build(self, world: World) -> nn.Module:
        return nn.Sequential(nn.Dropout(self.dropout), nn.Linear(1, 1)).to(world.device)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 10_000):
            inputs = torch.randn(8, 1, generator=torch.Generator().manual_seed(step))
            yield [{"inputs": inputs, "targets": 3 * inputs - 1}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        error: Tensor = model(micro_batch["inputs"]) - micro_batch["targets"]
        return {"loss": (error**2).sum()}


def train(folder: Path, *, dropout: float = 0.0, resume: str | None = None, **choices: Any) -> Run:
    """Train a straight line; `choices` are options of trainer.*, and `rate` the learning rate."""
    options: dict[str, Any] = {
        "device": "cpu",
        "optimizer": {"name": "adamw", "learning_rate": choices.pop("rate", 0.1), "weight_decay": 0.0},
        "trainer": {"max_steps": 6, "progress": False, "checkpoint_every": 1, "keep_checkpoints": 100} | choices,
    }
    return Trainer(Regression(dropout), output_dir=folder, options=options).train(resume)
