"""The task `text_generation`: next-token prediction over packed rows, documents isolated from one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.data.collate import simplify, split_micro_batches
from kitforge.data.packing import PackedRows
from kitforge.data.prefetch import Prefetcher
from kitforge.data.sampler import order
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import Cursor, MicroBatch, Sums, World
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.kits.transformers.data import Corpus
from kitforge.trainer.evaluate import weighted_means
from kitforge.trainer.task import Task


@final
class TextGenerationTask(Task):
    """A micro-batch holds tokens, targets and positions [rows, length], samples [rows], the step's number, and
    documents [rows, length] where a row holds more than one."""

    def __init__(
        self, options: TextGenerationOptions, corpus: Corpus, build: Callable[[torch.device], nn.Module]
    ) -> None:
        self._options = options
        self._corpus = corpus
        self._build = build

    def build(self, world: World) -> nn.Module:
        """The network, on the device."""
        return self._build(world.device)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, the head, norms and biases do not."""
        tables = [name for name, _ in model.named_parameters() if name in EMBEDDINGS]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows; the last one may be smaller."""
        return math.ceil(self._num_samples(epochs) / self._options.data.batch_size)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background."""
        with Prefetcher(self._batches(cursor), depth=self._options.data.prefetch) as batches:
            yield from batches

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Valid targets of the step."""
        valid = sum((micro_batch["targets"] != IGNORED).sum() for micro_batch in step)
        samples = sum(len(micro_batch["tokens"]) for micro_batch in step)
        return {"loss": torch.as_tensor(valid), "samples": torch.tensor(samples), "tokens": torch.as_tensor(valid)}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sum of cross entropies over the valid targets."""
        network = cast(CausalLM, model)
        device = network.head_weight.device
        noise = self._noise(micro_batch) if model.training else None
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
            self._evaluation_batches(rows),
            lambda batch: self.loss(model, batch),
            lambda batch: self.count([batch]),
        )
        loss = means["loss"]
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def state(self) -> dict[str, Any]:
        """Which tokens the cursor counts."""
        return {"corpus": self._corpus.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other tokens than those the run began with."""
        if state["corpus"] != self._corpus.fingerprint and not self._options.trainer.allow_changes:
            raise ConfigError(
                "the training text is not the one that the run began with",
                got=f"tokens {self._corpus.fingerprint[:12]}",
                expected=f"tokens {state['corpus'][:12]}",
                fix="put the files back, or add trainer.allow_changes=true to go on all the same",
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
            indices = order(options.seed, rows.num_rows, sample, wanted, shuffle=options.data.shuffle)
            gathered = rows.rows(indices) | {"samples": torch.arange(sample, sample + wanted)}
            for batch in split_micro_batches(gathered, size):
                yield self._micro_batches(batch, step)
                step += 1
            sample += wanted

    def _micro_batches(self, batch: dict[str, Tensor], step: int) -> list[MicroBatch]:
        size = self._options.trainer.micro_batch_size or self._options.data.batch_size
        return [{**simplify(part), "step": step} for part in split_micro_batches(batch, size)]

    def _evaluation_batches(self, rows: PackedRows) -> Iterator[MicroBatch]:
        size = self._options.trainer.micro_batch_size or self._options.data.batch_size
        limit = self._options.trainer.evaluate_batches
        # How a batch is split must not change what is evaluated.
        stop = rows.num_rows if limit is None else min(rows.num_rows, limit * self._options.data.batch_size)
        for start in range(0, stop, size):
            indices = np.arange(start, min(start + size, stop))
            yield {**simplify(rows.rows(indices)), "samples": torch.from_numpy(indices), "step": 0}

    def _noise(self, micro_batch: MicroBatch) -> DropoutKey:
        samples = tuple(micro_batch["samples"].tolist())
        return DropoutKey(seed=self._options.seed, step=micro_batch["step"], samples=samples)


IGNORED = -100
EMBEDDINGS = ("embedding.weight", "position.weight", "output")
# Rows gathered at once cost less each; this many tokens fit in the second-level cache.
TOKENS_GATHERED = 16384
