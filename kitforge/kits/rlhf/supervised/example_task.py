"""The common part of tasks over datasets; a task adds its micro-batches and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PreferencePair
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.batching import input_tokens, pair_batches, row_schedule
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.dataset import DatasetSplits, Row
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel, check_frozen_weights
from kitforge.trainer.dataset_task import DatasetTask

Options = TypeVar("Options", bound=StageOptions)


class ExampleTask(DatasetTask, Generic[Options, Row]):
    """Subclasses implement `micro_batches`, `count` and `loss`."""

    def __init__(
        self,
        options: Options,
        rows: DatasetSplits[Row],
        build: Callable[[World], nn.Module],
        world: World,
        frozen: ReferenceModel,
    ) -> None:
        self._options = options
        self._rows = rows
        self._reference_model = frozen
        schedule = replace(row_schedule(len(rows.train), options, world), mixture=rows.mixture)
        super().__init__(options, build, world, schedule, {"rows": rows.fingerprint}, len(rows.eval))

    @abstractmethod
    def micro_batches(self, model: nn.Module, rows: Sequence[Row], step: int) -> list[MicroBatch]:
        """This rank's micro-batches of the rows of a batch; `step` is 0 in evaluation."""

    def build(self, world: World) -> nn.Module:
        model = super().build(world)
        self._reference_model.hold_in(self._options.precision, model)
        return model

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step, batch in enumerate(self._schedule.batches(cursor.samples), start=cursor.step):
            yield self.micro_batches(model, [self._rows.train[index] for index in batch.rows], step)

    def eval_micro_batches(self, model: nn.Module) -> Iterator[MicroBatch]:
        rows = self._rows.eval
        for batch in self._schedule.eval_batches(len(rows)):
            yield from self.micro_batches(model, [rows[index] for index in batch], 0)

    def state(self) -> dict[str, Any]:
        """Fingerprints of the rows and the reference model."""
        return super().state() | self._reference_model.state

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore; refuse other rows, another reference model or another base model."""
        super().load_state(state)
        check_frozen_weights(self._reference_model.state, state, self._options.trainer.allow_config_changes)


class PairTask(ExampleTask[Options, PreferencePair], ABC):
    """A task over preference pairs. Micro-batches are those of `pair_batches`."""

    def micro_batches(self, model: nn.Module, rows: Sequence[PreferencePair], step: int) -> list[MicroBatch]:
        return pair_batches(rows, self._schedule, self._rows.pad_id)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Pairs of this rank's part of the step."""
        pairs = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        return {"loss": pairs, "samples": pairs, "input_tokens": input_tokens(step)}
