"""The task `text_generation`: next-token prediction over packed rows, documents isolated from one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.world import World
from kitforge.data.collate import drop_trivial_columns, split_micro_batches
from kitforge.data.packing import PackedRows
from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.data.sampler import shuffled_indices
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.progress import heartbeat
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.kits.transformers.data import Corpus
from kitforge.trainer.metric_means import weighted_means
from kitforge.trainer.task import Task


@final
class TextGenerationTask(Task):
    """A micro-batch holds tokens, targets and positions [rows, length], samples [rows], the step's number, and
    documents [rows, length] where a row holds more than one."""

    def __init__(
        self, options: TextGenerationOptions, corpus: Corpus, build: Callable[[World], nn.Module], world: World
    ) -> None:
        self._options = options
        self._corpus = corpus
        self._build = build
        self._world = world

    def build(self, world: World) -> nn.Module:
        """The network, on the device, cut as the world's degrees say."""
        return self._build(world)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, the head, norms and biases do not."""
        tables = [name for name, _ in model.named_parameters() if name in EMBEDDINGS]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows; the last one may be smaller."""
        return math.ceil(self._num_samples(epochs) / self._options.data.batch_size)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background."""
        with BackgroundPrefetcher(self._batches(cursor), depth=self._options.data.prefetch) as batches:
            yield from batches

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Valid targets of this rank's part of the step."""
        valid = sum((micro_batch["targets"] != IGNORED).sum() for micro_batch in step)
        samples = sum((micro_batch["samples"] != NO_SAMPLE).sum() for micro_batch in step)
        return {"loss": torch.as_tensor(valid), "samples": torch.as_tensor(samples), "tokens": torch.as_tensor(valid)}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sum of cross entropies over the valid targets."""
        network = cast(CausalLM, model)
        device = network.head_weight.device
        noise = self._dropout_key(micro_batch) if model.training else None
        documents = micro_batch.get("documents")
        context = Context.packed(
            micro_batch["positions"].to(device), None if documents is None else documents.to(device), noise
        )
        hidden = network.hidden(micro_batch["tokens"].to(device), context)
        targets = micro_batch["targets"].to(device).flatten()
        return {"loss": network.kernels.linear_cross_entropy(hidden.flatten(0, 1), network.head_weight, targets)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss in nats per token, eval/perplexity; independent of the batch size."""
        rows = self._corpus.eval
        if rows is None:
            return {}
        means = weighted_means(
            heartbeat(self._evaluation_batches(rows), "batches evaluated", enabled=self._options.trainer.progress),
            lambda batch: self.loss(model, batch),
            lambda batch: self.count([batch]),
            self._world.sum,
        )
        loss = means["loss"]
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def state(self) -> dict[str, Any]:
        """Which tokens the cursor counts."""
        return {"corpus": self._corpus.fingerprint, "eval": self._corpus.eval_fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other tokens than those the run began with."""
        now = self.state()
        words = {"corpus": "training", "eval": "evaluation"}
        changed = [name for name in words if state[name] != now[name]]
        if changed and not self._options.trainer.allow_data_changes:
            raise ConfigError(
                f"the {words[changed[0]]} text is not the one that the run began with",
                got=f"tokens {now[changed[0]][:12]}",
                expected=f"tokens {state[changed[0]][:12]}",
                fix="put the files back, or add trainer.allow_data_changes=true to go on all the same",
            )

    def _num_samples(self, epochs: float) -> int:
        return math.ceil(self._train_rows().num_rows * epochs)

    def _train_rows(self) -> PackedRows:
        if self._corpus.train is None:
            raise ConfigError("there is nothing to train on", got="data.train=null", expected="text to train on")
        return self._corpus.train

    def _batches(self, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Steps from the cursor on. Several are gathered at once where they are small."""
        options, rows = self._options, self._train_rows()
        size = options.data.batch_size
        epochs, max_steps = options.trainer.epochs, options.trainer.max_steps
        limit = None if epochs is None and max_steps is not None else self._num_samples(epochs or 1.0)
        together = max(1, TOKENS_GATHERED // (size * options.data.sequence_length))
        sample, step = cursor.samples, cursor.step
        while limit is None or sample < limit:
            wanted = size * together if limit is None else min(size * together, limit - sample)
            # Of each batch this rank gathers its own share only.
            replica_indices = [
                self._replica_indices(start, min(size, wanted - start)) for start in range(0, wanted, size)
            ]
            mine = np.concatenate(replica_indices)
            indices = shuffled_indices(options.seed, rows.num_rows, sample, wanted, shuffle=options.data.shuffle)
            gathered = rows.rows(indices[mine]) | {"samples": torch.from_numpy(sample + mine)}
            begin = 0
            for number, batch_indices in enumerate(replica_indices):
                batch = {name: column[begin : begin + len(batch_indices)] for name, column in gathered.items()}
                yield self._micro_batches(batch, step, min(size, wanted - number * size))
                begin += len(batch_indices)
                step += 1
            sample += wanted

    def _replica_indices(self, start: int, num_rows: int) -> NDArray[np.int64]:
        """Which of the rows start .. start + num_rows - 1 are this rank's; shares differ by one row at most."""
        begin, end = (
            num_rows * each // self._world.num_replicas for each in (self._world.replica, self._world.replica + 1)
        )
        return np.arange(start + begin, start + end)

    def _micro_batches(self, batch: dict[str, Tensor], step: int, num_rows: int) -> list[MicroBatch]:
        """This rank's rows of a batch of `num_rows`, in as many micro-batches as the rank with the most rows has."""
        largest = -(-num_rows // self._world.num_replicas)
        size = self._options.trainer.micro_batch_size or largest
        parts: list[MicroBatch] = [
            {**drop_trivial_columns(part), "step": step} for part in split_micro_batches(batch, size)
        ]
        return parts + [self._empty_micro_batch(step)] * (-(-largest // size) - len(parts))

    def _evaluation_batches(self, rows: PackedRows) -> Iterator[MicroBatch]:
        # As many rows at once as training has on one rank.
        largest = -(-self._options.data.batch_size // self._world.num_replicas)
        size = min(self._options.trainer.micro_batch_size or largest, largest)
        limit = self._options.trainer.eval_batches
        # How a batch is split must not change what is evaluated.
        stop = rows.num_rows if limit is None else min(rows.num_rows, limit * self._options.data.batch_size)
        for start in range(0, stop, size * self._world.num_replicas):
            begin = start + size * self._world.replica
            indices = np.arange(begin, min(begin + size, stop))
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

    def _dropout_key(self, micro_batch: MicroBatch) -> DropoutKey:
        samples = tuple(micro_batch["samples"].tolist())
        return DropoutKey(seed=self._options.seed, step=micro_batch["step"], samples=samples)


IGNORED = -100
NO_SAMPLE = -1
EMBEDDINGS = ("embedding.weight", "position.weight", "output")
# Rows gathered at once cost less each; this many tokens fit in the second-level cache.
TOKENS_GATHERED = 16384
