"""The task `recommendation`: steps over rows of a table, and whatever an objective makes small."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.world import World
from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.data.sampler import shuffled_indices
from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.recommender.config import RecommendationOptions
from kitforge.kits.recommender.data import RecommendationDataset
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.model import Recommender
from kitforge.kits.recommender.objective import Objective
from kitforge.kits.recommender.streaming_dataset import StreamingDataset
from kitforge.trainer.task import BestMetric, Task


@final
class RecommendationTask(Task):
    """A micro-batch holds what the objective makes of some rows, their global numbers [B], and the step's number."""

    def __init__(
        self,
        options: RecommendationOptions,
        dataset: RecommendationDataset,
        objective: Objective[Any],
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        self._options = options
        self._dataset = dataset
        self._objective = objective
        self._build = build
        self._world = world

    def build(self, world: World) -> nn.Module:
        """The network with its tables, its dense part as the world's degrees say."""
        return self._build(world)

    def metric_for_best(self) -> BestMetric:
        """The objective's own."""
        return BestMetric(name=self._objective.metric_for_best, mode="max")

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; biases and norms do not, and rows of tables are no parameters."""
        return decay_groups(model.named_parameters(), weight_decay=weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows; the last one may be smaller. A stream has none that is known."""
        if isinstance(self._dataset.train, StreamingDataset):
            return None
        return math.ceil(self._num_samples(epochs) / self._options.data.step_size)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background; then their rows, where a cache fetches ahead."""
        depth = self._options.cache.prefetch_batches
        tables = cast(EmbeddingCollection, cast(Recommender, model).tables)
        with BackgroundPrefetcher(self._batches(cursor), depth=self._options.data.prefetch) as batches:
            if depth == 0:
                yield from self._marked(batches)
                return
            with closing(tables.prefetch(batches, depth, ids=_requests)) as fetched:  # type: ignore[type-var]
                yield from self._marked(fetched)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """What this rank's part of the step is divided by."""
        samples = sum(len(micro_batch["samples"]) for micro_batch in step)
        losses = sum(self._objective.count(micro_batch) for micro_batch in step)
        return {"loss": torch.tensor(losses), "samples": torch.tensor(samples)}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The objective's sums."""
        return self._objective.loss(cast(Recommender, model), micro_batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The objective's metrics of the evaluation rows; independent of the batch size."""
        rows = self._dataset.eval
        if rows is None or rows.num_rows == 0:
            return {}
        batches = self._evaluation_batches(rows.num_rows)
        metrics = self._objective.evaluate(cast(Recommender, model), rows, batches, self._world)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """Which rows the cursor counts, and where a stream goes on."""
        train = self._dataset.train
        stream_state = {"stream": train.state()} if isinstance(train, StreamingDataset) else {}
        return {"rows": self._dataset.fingerprint, **stream_state}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other rows than those the run began with."""
        if state["rows"] != self._dataset.fingerprint and not self._options.trainer.allow_data_changes:
            raise ConfigError(
                "the training rows are not the ones that the run began with",
                got=f"rows {self._dataset.fingerprint[:12]}",
                expected=f"rows {state['rows'][:12]}",
                fix="put the files back, or add trainer.allow_data_changes=true to go on all the same",
            )
        if isinstance(self._dataset.train, StreamingDataset) and "stream" in state:
            self._dataset.train.load_state(state["stream"])

    def _marked(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The steps as they are. Those that were handed out count as trained in the checkpoints that follow, since
        these are only made between steps."""
        stream = self._dataset.train
        if not isinstance(stream, StreamingDataset):
            yield from steps
            return
        try:
            for step in steps:
                stream.mark_trained()
                yield step
        finally:
            stream.close()

    def _num_samples(self, epochs: float) -> int:
        return math.ceil(self._dataset.train_rows().num_rows * epochs)

    def _batches(self, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Steps from the cursor on."""
        if isinstance(self._dataset.train, StreamingDataset):
            yield from self._stream_batches(self._dataset.train, cursor)
            return
        options, rows = self._options, self._dataset.train_rows()
        size = options.data.step_size
        epochs, max_steps = options.trainer.epochs, options.trainer.max_steps
        limit = None if epochs is None and max_steps is not None else self._num_samples(epochs or 1.0)
        sample, step = cursor.samples, cursor.step
        while limit is None or sample < limit:
            wanted = size if limit is None else min(size, limit - sample)
            indices = shuffled_indices(options.seed, rows.num_rows, sample, wanted, shuffle=options.data.shuffle)
            yield self._micro_batches(rows, indices, sample, step)
            sample += wanted
            step += 1

    def _stream_batches(self, stream: StreamingDataset, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        sample, step, last = cursor.samples, cursor.step, self._options.trainer.max_steps
        # Rows behind the last step are not read: another run may take them.
        left = None if last is None else max(last - step, 0)
        for rows in islice(stream.batches(self._options.data.step_size), left):
            yield self._micro_batches(rows, np.arange(rows.num_rows), sample, step)
            sample += rows.num_rows
            step += 1

    def _micro_batches(self, rows: ClickDataset, indices: NDArray[np.int64], first: int, step: int) -> list[MicroBatch]:
        """This rank's share of a batch, in as many micro-batches as the rank with the largest share has."""
        world = self._world
        begin, end = (len(indices) * each // world.num_replicas for each in (world.replica, world.replica + 1))
        largest = -(-len(indices) // world.num_replicas)
        size = self._options.trainer.micro_batch_size or largest
        batch = self._objective.read(rows, indices, slice(begin, end), step)
        parts: list[MicroBatch] = []
        for start in range(0, largest, size):
            stop = min(start + size, end - begin)
            part = self._objective.micro_batch(batch, min(start, stop), stop)
            numbers = torch.arange(first + begin + min(start, stop), first + begin + stop)
            parts.append({**part, "samples": numbers, "step": step})
        return parts

    def _evaluation_batches(self, num_rows: int) -> Iterator[NDArray[np.int64]]:
        """Numbers of rows for this rank; empty ones where it has none left while others still compute together."""
        # As many rows at once as training has on one rank.
        largest = -(-self._options.data.step_size // self._world.num_replicas)
        size = min(self._options.trainer.micro_batch_size or largest, largest)
        limit = self._options.trainer.eval_batches
        # How a batch is split must not change what is evaluated.
        stop = num_rows if limit is None else min(num_rows, limit * self._options.data.step_size)
        for start in range(0, stop, size * self._world.num_replicas):
            begin = min(start + size * self._world.replica, stop)
            yield np.arange(begin, min(begin + size, stop))


def _requests(step: Sequence[MicroBatch]) -> list[Any]:
    """What tables will be called with in a step, in order."""
    return [requests for micro_batch in step for requests in micro_batch["calls"]]
