"""What the front door hands to a kit, and what it gets back: a run, or the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import torch
from torch import nn

from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.foundation.dtype import Precision
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.loop import Loop
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import Task

# What reads the rows of a task: the tokenizer of texts, the features of a table.
Processor = TypeVar("Processor")
Options = TypeVar("Options")


# Without slots, with which Python 3.11 makes no instance of a frozen dataclass by a name such as RunInputs[int].
@final
@dataclass(frozen=True, kw_only=True)
class RunInputs(Generic[Processor]):
    """Objects that a caller hands over instead of naming them in the options."""

    train_dataset: Any = None
    eval_dataset: Any = None
    model: nn.Module | None = None
    model_folder: Path | None = None  # of the run that the model came of, if it came of one
    initial_model: nn.Module | None = None  # of a trained model that is evaluated: what was handed over to be trained
    # Opens the model under the checkpoint, where the kit that goes on with it is not the one that trained it.
    open_model: Callable[..., Any] | None = None
    processor: Processor | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    model_name: str = "model"


@final
@dataclass(frozen=True, kw_only=True)
class RunAssembly(Generic[Options, Processor]):
    """A run ready to start."""

    loop: Loop
    folder: Path
    processor: Processor
    options: Options
    config_text: str


def evaluate_model(task: Task, parallel: ParallelModel, device: torch.device, precision: Precision) -> dict[str, float]:
    """What the task measures of a network outside of a run; its pieces are let go and its mode is as it was before."""
    model = parallel.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(device, precision):
            return task.evaluate(model)
    finally:
        parallel.reshard()
        model.train(was_training)
