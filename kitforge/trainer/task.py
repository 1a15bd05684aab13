"""What a run is about: the loop asks a task, never a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.world import World
from kitforge.data.schedule import BatchSchedule
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run, or of an evaluation."""

    metrics: dict[str, float]
    was_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMetric:
    """Which metric of an evaluation says what is best, and whether that is its smallest or its largest value."""

    name: str
    mode: Literal["min", "max"]


class Task(ABC):
    """A network, its data and its loss. Three methods are needed; the others have defaults that a task may replace.

    All that the loop divides is handed to it as sums: `loss` gives sums over a micro-batch, `count` the denominators
    of a whole step, known before its first forward pass. So k micro-batches equal one batch exactly.
    """

    @abstractmethod
    def build(self, world: World) -> nn.Module:
        """The network, on the world's device, ready to train."""

    @abstractmethod
    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `cursor` on, on any device. Ends when the data do. A step without any, on
        all ranks, is counted and moves nothing."""

    @abstractmethod
    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums over the micro-batch: "loss", which is differentiated, and any further metrics by name."""

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Denominators of the step. "loss" divides every sum without one of its own; "samples" and "tokens" move the
        cursor; "input_tokens", where more is read than learnt, is what throughput is about. Default: the loss is a mean
        over the samples, the first dim of the first tensor of a micro-batch."""
        samples = sum(len(next(iter(micro_batch.values()))) for micro_batch in step)
        return {"loss": torch.tensor(samples), "samples": torch.tensor(samples)}

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Which parameters decay. Default: those with two dims or more."""
        return decay_groups(model.named_parameters(), weight_decay=weight_decay)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the evaluation set by name, that of `metric_for_best` among them. Default: none."""
        return {}

    def metric_for_best(self) -> BestMetric:
        """The metric that selects the best evaluation unless trainer.metric_for_best is set. Default: eval/loss."""
        return BestMetric(name="eval/loss", mode="min")

    def progress_metrics(self) -> tuple[str, ...]:
        """The metrics of a step that people follow while it trains, as far as it has them. Default: the loss."""
        return ("loss",)

    def skip_reason(self, sums: Sums, counts: Sums) -> str | None:
        """Why this step must not move the weights; None: it may. `sums` and `counts` are those of all ranks, which then
        decide alike. Default: it always may."""
        return None

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the data; None where the task cannot know."""
        return None

    def frozen_parts(self, step: Sequence[MicroBatch]) -> Collection[str]:
        """Parts of the parameter groups that this step leaves as they are, moments and weight decay included. Default:
        none."""
        return ()

    def needs_checkpoint(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint is due after that many steps, none or more, whatever the options say of their number.
        Default: no."""
        return False

    def on_run_end(self, ending: RunResult) -> None:
        """The run is over, and ended as runs should. Default: nothing is to be done."""

    def state(self) -> dict[str, Any]:
        """What a resume needs besides the cursor, ready for JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""


def batch_schedule(
    options: RunOptions,
    world: World,
    *,
    num_rows: int,
    batch_size: int,
    shuffle: bool = True,
    max_tokens: int | None = None,
) -> BatchSchedule:
    """The batches of a run over that many rows, and the part of this rank's replica."""
    trainer = options.trainer
    return BatchSchedule(
        num_rows=num_rows,
        batch_size=batch_size,
        seed=options.seed,
        shuffle=shuffle,
        epochs=trainer.epochs,
        max_steps=trainer.max_steps,
        micro_batch_size=trainer.micro_batch_size,
        max_tokens=max_tokens,
        max_eval_batches=trainer.eval_batches,
        replica=world.replica,
        num_replicas=world.num_replicas,
    )
