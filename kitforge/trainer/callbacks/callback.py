"""What a callback is: one method that hears of every event, and a state if it has one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from kitforge.core.parallel.world import World
from kitforge.trainer.options import TrainerOptions
from kitforge.trainer.state import TrainingState

EventKind = Literal["start", "step", "log", "evaluate", "checkpoint", "rollback", "note", "table", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    start: before the first step. step: after every step. log, evaluate: `record` is a line of metrics.jsonl.
    checkpoint: one is due now. rollback: the newest one is about to be read, so it must be on the disk.
    table: `record` has `name`, `columns` and `rows` for people to read, which no file of the run needs.
    note: `record` has `event` and `message` (skip, resume, rollback, interrupt, ...). end: after the last step, also
    after an interruption or a failure; `is_clean` is False after a failure, when no other rank is there any more to
    exchange anything with, and what a callback holds of this process is to be let go.
    """

    kind: EventKind
    record: dict[str, Any] = field(default_factory=dict)
    is_clean: bool = True


class RunContext(Protocol):
    """What a callback may see of the loop, and ask of it. Every rank has its own; rank 0 writes for people."""

    model: nn.Module
    world: World
    state: TrainingState
    options: TrainerOptions
    folder: Path | None
    max_steps: int
    stop_reason: str | None
    progress_metrics: tuple[str, ...]

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        ...

    def log_event(self, event: str, message: str) -> None:
        """Tell all callbacks that something happened."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand a table of texts and numbers to whatever tracks the run."""
        ...

    def checkpoint_state(self) -> dict[str, Any]:
        """The whole of state.json."""
        ...


def can_save_at_end(event: Event, run: RunContext) -> bool:
    """Whether the run ends now, after a whole step, and all ranks are there to save what they hold together. One
    process saves after a failure as well."""
    return event.kind == "end" and run.state.is_consistent and (event.is_clean or run.world.all_ranks is None)


class Callback(ABC):
    """Hears every event, in the order in which the callbacks were given."""

    @abstractmethod
    def on_event(self, event: Event, run: RunContext) -> None:
        """Act on the event, or let it pass."""

    def state(self) -> dict[str, Any]:
        """What a resume needs, ready for JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
