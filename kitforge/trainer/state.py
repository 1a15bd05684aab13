"""The training state: what changes during a run, and how it is saved to and loaded from checkpoints."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from kitforge.core.checkpoint.load import Checkpoint, load_tensors
from kitforge.core.checkpoint.table_reader import tables_of
from kitforge.core.optim.build import Optimizer
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.optim.schedules import Plateau
from kitforge.core.optim.table_protocols import RowTable
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.offload import HostOptimizer
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.world import World
from kitforge.foundation import device as devices
from kitforge.foundation import seed as seeds
from kitforge.foundation.types import Cursor
from kitforge.trainer.precision import GradScaler

# Fields saved unchanged in checkpoints.
SAVED_FIELDS = (
    "updates",
    "skipped",
    "consecutive_skips",
    "best_value",
    "best_step",
    "best_metrics",
    "last_eval_step",
    "result_step",
    "seconds",
)


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Model, optimizer, counters and random state of a run."""

    model: nn.Module
    parallel: ParallelModel  # the sharded model
    optimizer: Optimizer | HostOptimizer
    scaler: GradScaler
    plateau: Plateau
    world: World
    groups: Sequence[ParameterGroup] = ()  # of the optimizer
    cursor: Cursor = field(default_factory=Cursor)
    updates: int = 0  # steps that changed the weights; the schedule counts these
    skipped: int = 0  # steps whose gradients were not finite, or in which nothing was counted
    consecutive_skips: int = 0
    best_value: float | None = None  # of trainer.metric_for_best
    best_step: int | None = None
    best_metrics: dict[str, float | None] | None = None  # of the evaluation at best_step; None: not finite
    last_eval_step: int | None = None  # the step of the last evaluation
    is_consistent: bool = True  # False within a step, when weights and cursor may not belong together
    result_step: int | None = None  # the step whose weights are the result; None: the last one
    seconds: float = 0.0  # of training, over all sessions
    log_accumulator: dict[str, float] = field(default_factory=dict)  # sums and counts since the last log line

    def tables(self) -> dict[str, RowTable]:
        """The embedding tables, by name."""
        return tables_of(self.parallel.tables)

    def layouts(self) -> dict[str, Layout]:
        """The layouts of parameters and, by their own names, of the optimizer states sharded like them."""
        layouts = self.parallel.layouts
        found = dict(layouts)
        for name, state in self.optimizer.tensors():
            owner = layouts.get(name.rpartition(".")[0])
            if owner is not None and state.dim() == len(owner.shape):
                found[name] = owner
            elif owner is not None:
                found[name] = Layout(shape=tuple(state.shape), stages=owner.stages)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything but tensors, ready for JSON."""
        return {
            "cursor": asdict(self.cursor),
            **{name: getattr(self, name) for name in SAVED_FIELDS},
            "log_accumulator": dict(self.log_accumulator),
            "scaler": self.scaler.state(),
            "plateau": self.plateau.state(),
            "random": self._random_states(),
        }

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore the checkpoint, bit for bit."""
        self.load_weights(checkpoint)
        plain = checkpoint.state["training"]
        self.cursor = Cursor(**plain["cursor"])
        for name in SAVED_FIELDS:
            # A checkpoint of an earlier version may lack a field.
            setattr(self, name, plain.get(name, getattr(self, name)))
        self.log_accumulator = dict(plain["log_accumulator"])
        self._set_random_state(plain["random"])

    def _random_states(self) -> list[dict[str, str]]:
        """The random state of each replica; its ranks share one."""
        current = devices.random_state(self.world.device)
        own = {name: base64.b64encode(value.numpy().tobytes()).decode() for name, value in current.items()}
        found: dict[int, dict[str, str]] = {}
        for replica, states in self.world.all_gather_object((self.world.replica, own)):
            found.setdefault(replica, states)
        return [found[replica] for replica in range(len(found))]

    def _set_random_state(self, stored: Sequence[Mapping[str, str]]) -> None:
        """Restore the random state of this rank's replica. Replicas that the checkpoint does not have get streams of
        their own."""
        replica = self.world.replica
        states = stored[replica % len(stored)]
        raw = {name: bytearray(base64.b64decode(text)) for name, text in states.items()}
        devices.set_random_state(
            {name: torch.frombuffer(each, dtype=torch.uint8) for name, each in raw.items()}, self.world.device
        )
        if replica >= len(stored):
            torch.manual_seed(seeds.key(states["cpu"], "replica", replica))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Load weights, tables, optimizer, loss scale and plateau; the data position stays. A rank that trains nothing
        has none of them."""
        if not self.world.is_training:
            return
        weights, states = dict(self.parallel.tensors()), dict(self.optimizer.tensors())
        regions = self.parallel.regions(self.layouts())
        # What other ranks hold is read by them; what no rank holds is unexpected.
        elsewhere = set(self.parallel.union([*weights, *states])) - weights.keys() - states.keys()
        load_tensors(weights, checkpoint.model(regions, elsewhere), what="model")
        self.optimizer.load(dict(checkpoint.optimizer(regions, elsewhere)))
        checkpoint.load_tables(self.tables())
        self.scaler.load_state(checkpoint.state["training"]["scaler"])
        self.plateau.load_state(checkpoint.state["training"]["plateau"])
