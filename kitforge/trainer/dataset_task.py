"""Tasks over a dataset: the schedule of its rows, the means of an evaluation, and the refusal of changed rows."""

from abc import ABC
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from torch import nn

from kitforge.core.nn.context import DropoutKey
from kitforge.core.optim.groups import ParameterGroup, network_groups
from kitforge.core.parallel.world import World
from kitforge.data.schedule import BatchSchedule
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.progress import heartbeat
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.metric_means import weighted_means
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task

Item = TypeVar("Item")
# What is said of a fingerprint in a state that has changed.
_CHANGES = {
    "corpus": "training text is not the one",
    "eval": "evaluation text is not the one",
    "rows": "rows are not those",
}


class DatasetTask(Task, ABC):
    """A task whose steps follow a schedule of rows; it adds their micro-batches, counts and loss."""

    steps_read_weights = False

    def __init__(
        self,
        options: RunOptions,
        build: Callable[[World], nn.Module],
        world: World,
        schedule: BatchSchedule,
        fingerprints: Mapping[str, str],
        num_eval_rows: int,
    ) -> None:
        self._run_options = options
        self._build = build
        self._world = world
        self._schedule = schedule
        self._fingerprints = fingerprints
        self._num_eval_rows = num_eval_rows

    def eval_micro_batches(self, model: nn.Module) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the evaluation rows, for the default of `evaluate`."""
        return iter(())

    def build(self, world: World) -> nn.Module:
        return self._build(world)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """See `network_groups`."""
        return network_groups(model, weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows; the last one may be smaller. None for a stream."""
        return self._schedule.num_steps(epochs)

    def epoch(self, cursor: Cursor) -> float | None:
        """Samples over rows; None for a stream."""
        return None if self.num_steps(1.0) is None else self._schedule.epoch(cursor.samples)

    def is_endless(self) -> bool:
        """Whether the data last for any number of steps."""
        return self._schedule.is_endless

    def data_sizes(self) -> dict[str, int]:
        """Rows; 0 for a stream."""
        rows, batch = self._schedule.num_rows, self._schedule.batch_size
        return {"rows": rows, "evaluation rows": self._num_eval_rows, "batch": batch}

    def position_metrics(self, samples: int) -> dict[str, float]:
        """Samples of each source of a mixture so far."""
        return {} if self._schedule.mixture is None else self._schedule.mixture.metrics(samples)

    def dropout_key(self, micro_batch: MicroBatch) -> DropoutKey:
        """The key of a training micro-batch."""
        samples = tuple(micro_batch["samples"].tolist())
        return DropoutKey(seed=self._run_options.seed, step=micro_batch["step"], samples=samples)

    def eval_sums(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of an evaluation; by default those of the loss."""
        return self.loss(model, micro_batch)

    def eval_counts(self, micro_batch: MicroBatch) -> Sums:
        """The denominators of `eval_sums`."""
        return self.count([micro_batch])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/NAME for all sums, over the evaluation rows; independent of the batch size."""
        if not self._num_eval_rows:
            return {}
        with self.shown(self.eval_micro_batches(model)) as batches:
            means = weighted_means(batches, partial(self.eval_sums, model), self.eval_counts, self._world.sum)
        return {f"eval/{name}": value for name, value in means.items()}

    def shown(self, batches: Iterator[Item]) -> closing[Generator[Item]]:
        """The batches of an evaluation, counted on the terminal."""
        is_shown = self._run_options.trainer.progress and self._world.rank == 0
        return closing(heartbeat(batches, "batches evaluated", enabled=is_shown))

    def state(self) -> dict[str, Any]:
        """Which rows the cursor counts."""
        return dict(self._fingerprints)

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other rows than those that the run began with."""
        check_same_rows(state, self._fingerprints, self._run_options)


def check_same_rows(state: Mapping[str, Any], fingerprints: Mapping[str, str], options: RunOptions) -> None:
    """Raise ConfigError for fingerprints that are not those in a state, unless trainer.allow_data_changes is on."""
    changed = [name for name, now in fingerprints.items() if state[name] != now]
    if changed and not options.trainer.allow_data_changes:
        name, split = changed[0], "evaluation" if changed[0] == "eval" else "training"
        raise ConfigError(
            f"the {_CHANGES[name]} that the run began with",
            got=f"{split} rows {fingerprints[name][:12]}",
            expected=f"{split} rows {state[name][:12]}",
            fix="put the files (and weights) back, or add trainer.allow_data_changes=true to go on all the same",
        )
