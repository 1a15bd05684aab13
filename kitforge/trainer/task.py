"""The interface of a task: the loop knows a `Task`, never a model."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.micro_batches import Losses
from kitforge.core.parallel.world import World
from kitforge.data.schedule import BatchSchedule
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.options import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMetric:
    """The metric that selects the best evaluation, and whether lower or higher is better."""

    name: str
    mode: Literal["min", "max"]


class Task(Losses, ABC):
    """A network, its data and its loss: `build`, `steps`, and either `loss` or `inputs` and `loss_of`. The other
    methods have defaults.

    The loop divides sums by counts: `loss` returns sums over a micro-batch, `count` the denominators of a whole step,
    known before its first forward pass. So k micro-batches equal one batch exactly.
    """

    @abstractmethod
    def build(self, world: World) -> nn.Module:
        """The network, on the world's device, ready to train; a module without parameters on a rank that trains
        nothing."""

    @abstractmethod
    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `cursor` on, on any device, until the data end. A step without
        micro-batches (on all ranks that train) is counted as skipped."""

    # Whether `steps` reads weights otherwise than by passes of the model, as an engine that generates does.
    steps_read_weights = True

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Denominators of the step by name. "loss" is also that of sums without their own; "samples" and "tokens"
        advance the cursor; "input_tokens" counts throughput if it exceeds "tokens". Default: a mean over the samples,
        the first dim of the first tensor of a micro-batch."""
        samples = sum(len(next(iter(micro_batch.values()))) for micro_batch in step)
        return {"loss": torch.tensor(samples), "samples": torch.tensor(samples)}

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Parameter groups of the optimizer. Default: parameters with two dims or more have weight decay."""
        return decay_groups(model.named_parameters(), weight_decay=weight_decay)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics of the evaluation set by name, including `metric_for_best`. Default: none."""
        return {}

    def metric_for_best(self) -> BestMetric:
        """The metric that selects the best evaluation unless trainer.metric_for_best is set. Default: eval/loss."""
        return BestMetric(name="eval/loss", mode="min")

    def data_sizes(self) -> dict[str, int]:
        """What the data hold, for the start of a run, such as "rows", and the samples of a "batch" over all replicas.
        Default: not known."""
        return {}

    def progress_metrics(self) -> tuple[str, ...]:
        """Metrics of the progress line, as far as a step has them. Default: the loss."""
        return ("loss",)

    def skip_reason(self, sums: Sums, counts: Sums) -> str | None:
        """Why this step must not update the weights; None: it updates them. `sums` and `counts` are over all ranks,
        which therefore decide alike. Default: None."""
        return None

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the data; None if unknown."""
        return None

    def epoch(self, cursor: Cursor) -> float | None:
        """Passes over the data so far; None if unknown. Default: steps over those of one pass, of which the last one
        may be smaller."""
        per_epoch = self.num_steps(1.0)
        return None if per_epoch is None else cursor.step / per_epoch

    def position_metrics(self, samples: int) -> dict[str, float]:
        """Metrics of every log line that follow from the number of samples consumed, over all ranks. Default: none."""
        return {}

    def is_endless(self) -> bool:
        """Whether the data last for trainer.max_steps without trainer.epochs. If not, the run ends with them, and the
        learning rate schedule with it. Default: they do."""
        return True

    def frozen_parts(self, step: Sequence[MicroBatch]) -> Collection[str]:
        """Parts of the parameter groups that this step does not update. Default: none."""
        return ()

    def needs_checkpoint(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint is due after that many steps, besides those of trainer.checkpoint_every. Default: no."""
        return False

    def on_run_end(self) -> None:
        """Called after a run that did not fail. Default: nothing."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint besides the cursor, as JSON values and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`."""


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
        copies=options.parallel.slices,
    )
