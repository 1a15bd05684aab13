"""The task `text_generation`: next-token prediction over packed rows with document isolation."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.core.nn.context import Context
from kitforge.core.parallel.world import World
from kitforge.data.collate import drop_trivial_columns
from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.data.text.packing import ConcatenatedRows, PackedRows
from kitforge.data.text.streaming import Position, TextStream
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import IGNORED, Cursor, MicroBatch, Sums
from kitforge.kits.language_model import packed_inputs, token_cross_entropy
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.kits.transformers.data import Corpus
from kitforge.trainer.dataset_task import DatasetTask
from kitforge.trainer.task import batch_schedule


class TextGenerationTask(DatasetTask):
    """A micro-batch holds tokens, targets and positions [rows, length], samples [rows], the step's number, and
    documents [rows, length] where a row holds more than one."""

    def __init__(
        self, options: TextGenerationOptions, corpus: Corpus, build: Callable[[World], nn.Module], world: World
    ) -> None:
        self._options = options
        self._corpus = corpus
        data = options.data
        num_rows = 0 if corpus.train is None else corpus.train.num_rows
        schedule = batch_schedule(options, world, num_rows=num_rows, batch_size=data.batch_size, shuffle=data.shuffle)
        schedule = dataclasses.replace(schedule, mixture=corpus.mixture)
        fingerprints = {"corpus": corpus.fingerprint, "eval": corpus.eval_fingerprint}
        num_eval_rows = 0 if corpus.eval is None else corpus.eval.num_rows
        super().__init__(options, build, world, schedule, fingerprints, num_eval_rows)
        self._positions: dict[str, Position] = {}  # of the lanes of a stream, after the last step that was yielded

    def data_sizes(self) -> dict[str, int]:
        sizes = super().data_sizes()
        return {"tokens": sizes["rows"] * self._options.data.sequence_length, **sizes}

    def num_steps(self, epochs: float) -> int | None:
        if self._corpus.stream is not None:
            return None
        self._train_rows()
        return self._schedule.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background."""
        depth = self._options.data.prefetch
        if self._corpus.stream is None:
            with BackgroundPrefetcher(self._batches(cursor), depth) as batches:
                yield from batches
            return
        with BackgroundPrefetcher(self._streamed(self._corpus.stream, cursor), depth) as streamed:
            # The position is that of the steps taken, not of those prefetched.
            for step, self._positions in streamed:
                yield step

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The number of valid targets on this rank: the denominator of the mean loss."""
        valid = sum((micro_batch["targets"] != IGNORED).sum() for micro_batch in step)
        samples = sum((micro_batch["samples"] != NO_SAMPLE).sum() for micro_batch in step)
        return {"loss": torch.as_tensor(valid), "samples": torch.as_tensor(samples), "tokens": torch.as_tensor(valid)}

    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Context]:
        """The tokens, and the documents that share a row."""
        return packed_inputs(micro_batch, self.dropout_key(micro_batch), self._world.device)

    def loss_of(self, model: nn.Module, hidden: Tensor, micro_batch: MicroBatch) -> Sums:
        return token_cross_entropy(model, hidden, micro_batch["targets"])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss in nats per token, eval/perplexity; independent of the batch size."""
        found = super().evaluate(model)
        return found | {"eval/perplexity": math.exp(min(found["eval/loss"], 700.0))} if found else {}

    def state(self) -> dict[str, Any]:
        """Which tokens the cursor counts, and of a stream the positions of all lanes."""
        if self._corpus.stream is None:
            return super().state()
        positions: dict[str, Position] = {}
        for own in self._world.all_gather_object(self._positions):
            positions |= own
        return super().state() | {"stream": positions}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._positions = state.get("stream", {})
        num_lanes = 0 if self._corpus.stream is None else self._corpus.stream.num_lanes
        if len(self._positions) not in (0, num_lanes):
            raise ConfigError(
                "the stream cannot be continued with another batch size",
                got=f"data.batch_size={self._options.data.batch_size}",
                expected=f"data.batch_size={len(self._positions)}, as in the checkpoint",
            )

    def _train_rows(self) -> PackedRows | ConcatenatedRows:
        if self._corpus.train is None:
            raise ConfigError("there is nothing to train on", got="data.train=null", expected="text to train on")
        return self._corpus.train

    def _batches(self, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Steps from the cursor on. Small batches are gathered several at once."""
        rows, data = self._train_rows(), self._options.data
        num_gathered = max(1, TOKENS_GATHERED // (data.batch_size * data.sequence_length))
        batches, step = self._schedule.batches(cursor.samples), cursor.step
        while group := list(islice(batches, num_gathered)):
            # Each rank gathers its own part only.
            shards = [self._schedule.shard(len(batch.rows)) for batch in group]
            indices = np.concatenate([batch.rows[shard] for batch, shard in zip(group, shards, strict=True)])
            numbers = [
                batch.start + np.arange(shard.start, shard.stop) for batch, shard in zip(group, shards, strict=True)
            ]
            gathered = rows.rows(indices) | {"samples": torch.from_numpy(np.concatenate(numbers))}
            begin = 0
            for batch, shard in zip(group, shards, strict=True):
                parts = [
                    slice(begin + part.start - shard.start, begin + part.stop - shard.start)
                    for part in self._schedule.micro_batches(len(batch.rows))
                ]
                yield [self._micro_batch(gathered, part, step) for part in parts]
                begin += shard.stop - shard.start
                step += 1

    def _streamed(self, stream: TextStream, cursor: Cursor) -> Iterator[tuple[list[MicroBatch], dict[str, Position]]]:
        """Steps of a stream from the cursor on, each with the positions of this replica's lanes after it."""
        size = self._options.data.batch_size
        part, parts = self._schedule.shard(size), self._schedule.micro_batches(size)
        for number, (rows, positions) in enumerate(stream.batches(part, self._positions)):
            first = cursor.samples + number * size
            gathered = rows | {"samples": torch.arange(first + part.start, first + part.stop)}
            own = [slice(each.start - part.start, each.stop - part.start) for each in parts]
            yield [self._micro_batch(gathered, each, cursor.step + number) for each in own], positions

    def _micro_batch(self, gathered: dict[str, Tensor], part: slice, step: int) -> MicroBatch:
        if part.start == part.stop:
            return self._empty_micro_batch(step)
        return {**drop_trivial_columns({name: column[part] for name, column in gathered.items()}), "step": step}

    def eval_micro_batches(self, model: nn.Module) -> Iterator[MicroBatch]:
        rows = self._corpus.eval
        assert rows is not None
        for indices in self._schedule.eval_shards(rows.num_rows):
            if len(indices):
                yield {**drop_trivial_columns(rows.rows(indices)), "samples": torch.from_numpy(indices), "step": 0}
            else:
                yield self._empty_micro_batch(0)

    def _empty_micro_batch(self, step: int) -> MicroBatch:
        """A row in which nothing counts, for a rank that has no rows left while others still compute together."""
        length = self._options.data.sequence_length
        tokens = torch.zeros(1, length, dtype=torch.int64)
        return {
            "tokens": tokens,
            "targets": torch.full_like(tokens, IGNORED),
            "positions": torch.arange(length).unsqueeze(0),
            "samples": torch.tensor([NO_SAMPLE]),
            "step": step,
        }


NO_SAMPLE = -1
# Rows gathered at once cost less each; this many tokens fit in the second-level cache.
TOKENS_GATHERED = 16384
