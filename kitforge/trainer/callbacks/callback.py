"""The interface of callbacks: one method for all events, and an optional state."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from kitforge.core.parallel.world import World
from kitforge.trainer.options import TrainerOptions
from kitforge.trainer.state import TrainingState

EventKind = Literal["start", "step", "log", "evaluate", "checkpoint", "note", "table", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of the loop.

    start: before the first step. step: after every step. log, evaluate: `record` is a line of metrics.jsonl.
    checkpoint: a checkpoint is due.
    table: `record` has `name`, `columns` and `rows`, for experiment trackers.
    note: `record` has `event` and `message` (skip, resume, interrupt, ...). end: after the last step, also
    after an interruption or a failure. After a failure `is_clean` is False: no collective is possible any more, and
    callbacks release the resources of this process.
    """

    kind: EventKind
    record: dict[str, Any] = field(default_factory=dict)
    is_clean: bool = True


class RunContext(Protocol):
    """The part of the loop that callbacks may use. Every rank has callbacks; rank 0 writes files and displays."""

    world: World
    state: TrainingState
    options: TrainerOptions
    folder: Path | None
    max_steps: int
    stop_reason: str | None
    progress_metrics: tuple[str, ...]

    @property
    def model(self) -> nn.Module:
        """The network, with the weights of the last step."""

    def stop(self, reason: str) -> None:
        """End the run after this step."""

    def log_event(self, event: str, message: str) -> None:
        """Send an event to all callbacks."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table to all callbacks, for experiment trackers."""

    def checkpoint_state(self) -> dict[str, Any]:
        """The content of state.json."""


def can_save_at_end(event: Event, run: RunContext) -> bool:
    """Whether this is the end of the run, after a whole step, with all ranks present. A single process may save after a
    failure too."""
    return event.kind == "end" and run.state.is_consistent and (event.is_clean or run.world.all_ranks is None)


class Callback(ABC):
    """Receives every event, in the order of the callbacks."""

    @abstractmethod
    def on_event(self, event: Event, run: RunContext) -> None:
        """Handle the event."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
