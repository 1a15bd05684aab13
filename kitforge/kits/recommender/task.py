"""The task `recommendation`: batches of rows for the objective of the family."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.data.schedule import Batch
from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.recommender.config import RecommendationOptions
from kitforge.kits.recommender.data import RecommendationDataset
from kitforge.kits.recommender.dataset import ClickDataset, StreamingDataset
from kitforge.kits.recommender.model import Recommender
from kitforge.kits.recommender.objective import Objective
from kitforge.trainer.dataset_task import DatasetTask
from kitforge.trainer.task import BestMetric, batch_schedule


class RecommendationTask(DatasetTask):
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
        num_rows = 0 if dataset.train is None or isinstance(dataset.train, StreamingDataset) else dataset.train.num_rows
        data = options.data
        schedule = batch_schedule(options, world, num_rows=num_rows, batch_size=data.step_size, shuffle=data.shuffle)
        num_eval_rows = 0 if dataset.eval is None else dataset.eval.num_rows
        super().__init__(options, build, world, schedule, {"rows": dataset.fingerprint}, num_eval_rows)

    def metric_for_best(self) -> BestMetric:
        """The objective's own."""
        return BestMetric(name=self._objective.metric_for_best, mode="max")

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows; the last one may be smaller. A stream has none that is known."""
        if isinstance(self._dataset.train, StreamingDataset):
            return None
        self._dataset.train_rows()
        return self._schedule.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background; then their rows, where a cache fetches ahead."""
        depth = self._options.cache.prefetch_batches
        tables = cast(EmbeddingCollection, cast(Recommender, model).tables)
        with BackgroundPrefetcher(self._batches(cursor), depth=self._options.data.prefetch) as batches:
            if depth == 0:
                yield from self._marked(batches)
                return
            # A step of micro-batches, of which each says what tables will be called with, in order.
            prefetched = tables.prefetch(
                batches, depth, ids=lambda step: [each for part in step for each in part["calls"]]
            )
            with closing(prefetched) as fetched:  # type: ignore[type-var]
                yield from self._marked(fetched)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """What this rank's part of the step is divided by."""
        samples = sum(len(micro_batch["samples"]) for micro_batch in step)
        losses = sum(self._objective.count(micro_batch) for micro_batch in step)
        return {"loss": torch.tensor(losses), "samples": torch.tensor(samples)}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return self._objective.loss(cast(Recommender, model), micro_batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The objective's metrics of the evaluation rows; independent of the batch size."""
        rows = self._dataset.eval
        if rows is None or rows.num_rows == 0:
            return {}
        with self.shown(self._schedule.eval_shards(rows.num_rows)) as batches:
            metrics = self._objective.evaluate(cast(Recommender, model), rows, batches, self._world)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        train = self._dataset.train
        stream_state = {"stream": train.state()} if isinstance(train, StreamingDataset) else {}
        return super().state() | stream_state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
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

    def _batches(self, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        stream, sample, last = self._dataset.train, cursor.samples, self._options.trainer.max_steps
        if not isinstance(stream, StreamingDataset):
            rows = self._dataset.train_rows()
            for step, batch in enumerate(self._schedule.batches(sample), start=cursor.step):
                yield self._micro_batches(rows, batch, step)
            return
        # Rows behind the last step are not read: another run may take them.
        left = None if last is None else max(last - cursor.step, 0)
        for step, read in enumerate(islice(stream.batches(self._options.data.step_size), left), start=cursor.step):
            yield self._micro_batches(read, Batch(sample, np.arange(read.num_rows)), step)
            sample += read.num_rows

    def _micro_batches(self, rows: ClickDataset, batch: Batch, step: int) -> list[MicroBatch]:
        """This replica's part of a batch."""
        shard = self._schedule.shard(len(batch.rows))
        own, parts = self._objective.read(rows, batch.rows, shard, step), list[MicroBatch]()
        for part in self._schedule.micro_batches(len(batch.rows)):
            micro_batch = self._objective.micro_batch(own, part.start - shard.start, part.stop - shard.start)
            numbers = torch.arange(batch.start + part.start, batch.start + part.stop)
            parts.append({**micro_batch, "samples": numbers, "step": step})
        return parts
