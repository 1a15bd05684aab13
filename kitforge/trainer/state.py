"""All that changes while a run goes on, and how it becomes a checkpoint and back."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import Checkpoint, load_tensors
from kitforge.core.optim.build import Optimizer
from kitforge.core.optim.schedules import Plateau
from kitforge.foundation import device as devices
from kitforge.foundation.types import Cursor
from kitforge.trainer.precision import LossScaler

# Fields that go into a checkpoint as they are.
COUNTERS = ("updates", "skipped", "consecutive_skips", "best", "best_step", "evaluated", "result_step", "seconds")


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """The moving parts of a run."""

    model: nn.Module
    optimizer: Optimizer
    scaler: LossScaler
    plateau: Plateau
    device: torch.device
    cursor: Cursor = field(default_factory=Cursor)
    updates: int = 0  # steps that changed the weights; the schedule counts these
    skipped: int = 0  # steps whose gradients were not finite
    consecutive_skips: int = 0
    best: float | None = None  # of the monitored metric
    best_step: int | None = None
    evaluated: int | None = None  # the step of the last evaluation
    is_settled: bool = True  # False within a step, when weights and cursor may not belong together
    result_step: int | None = None  # whose weights are the run's result; None: the last step's
    seconds: float = 0.0  # of training, over all sessions
    window: dict[str, float] = field(default_factory=dict)  # sums and counts since the last log line

    def model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers by name."""
        yield from self.model.state_dict(keep_vars=True).items()

    def plain(self) -> dict[str, Any]:
        """Everything but tensors, ready for JSON."""
        return {
            "cursor": asdict(self.cursor),
            **{name: getattr(self, name) for name in COUNTERS},
            "window": dict(self.window),
            "scaler": self.scaler.state(),
            "plateau": self.plateau.state(),
            "random": {name: _to_text(value) for name, value in devices.random_state(self.device).items()},
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Become what the checkpoint holds, bit for bit."""
        self.load_weights(checkpoint)
        plain = checkpoint.state["training"]
        self.cursor = Cursor(**plain["cursor"])
        for name in COUNTERS:
            setattr(self, name, plain[name])
        self.window = dict(plain["window"])
        devices.set_random_state({name: _from_text(text) for name, text in plain["random"].items()}, self.device)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Take weights, optimizer, scale and plateau from the checkpoint; the place in the data stays."""
        load_tensors(dict(self.model_tensors()), checkpoint.model(), what="model")
        self.optimizer.materialise()
        self.optimizer.load(dict(checkpoint.optimizer()))
        self.scaler.load_state(checkpoint.state["training"]["scaler"])
        self.plateau.load_state(checkpoint.state["training"]["plateau"])


def _to_text(value: Tensor) -> str:
    return base64.b64encode(value.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
