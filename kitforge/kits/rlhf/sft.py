"""The task `sft`: a model learns to answer as demonstrations do. Only what it is to say itself is learnt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.world import World
from kitforge.data.collate import simplify
from kitforge.data.dialogues import Response
from kitforge.data.packing import IGNORED
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.collate import packed
from kitforge.kits.rlhf.config import SFTOptions
from kitforge.kits.rlhf.order import Indices, Order
from kitforge.kits.rlhf.rows import Rows
from kitforge.kits.rlhf.weights import decoder_groups
from kitforge.trainer.evaluate import weighted_means
from kitforge.trainer.task import Task


@final
class SFTTask(Task):
    """A micro-batch holds tokens, targets and positions [rows, length], documents where a row holds more than one,
    members and places [rows], how many responses each holds and which row of the batch it is, and the step's number.

    The whole batch is packed before it is shared out, so that neither ranks nor micro-batches change a row.
    """

    def __init__(
        self, options: SFTOptions, rows: Rows[Response], build: Callable[[World], nn.Module], world: World
    ) -> None:
        self._options = options
        self._rows = rows
        self._build = build
        self._world = world
        self._order = Order(len(rows.train), options, world)

    def build(self, world: World) -> nn.Module:
        """The network, on the device, cut as the world's degrees say."""
        return self._build(world)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, the head, norms and biases do not."""
        return decoder_groups(model, weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the rows."""
        return self._order.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on."""
        for step, batch in enumerate(self._order.batches(cursor), start=cursor.step):
            yield self._micro_batches(self._rows.train, batch, step)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Learnt tokens of this rank's part of the step."""
        learnt = torch.as_tensor(sum((micro_batch["targets"] != IGNORED).sum() for micro_batch in step))
        samples = torch.tensor(sum(int(micro_batch["members"].sum()) for micro_batch in step))
        return {"loss": learnt, "samples": samples, "tokens": learnt}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sum of cross entropies over the learnt tokens."""
        network = cast(CausalLM, model)
        device = network.head_weight.device
        documents = micro_batch.get("documents")
        places = tuple(micro_batch["places"].tolist())
        noise = DropoutKey(seed=self._options.seed, step=micro_batch["step"], samples=places)
        context = Context.packed(
            micro_batch["positions"].to(device),
            None if documents is None else documents.to(device),
            noise if model.training else None,
        )
        hidden = network.hidden(micro_batch["tokens"].to(device), context)
        targets = micro_batch["targets"].to(device).flatten()
        return {"loss": network.kernels.linear_cross_entropy(hidden.flatten(0, 1), network.head_weight, targets)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss in nats per learnt token, eval/perplexity; independent of the batch size."""
        rows = self._rows.eval
        if not rows:
            return {}
        means = weighted_means(
            (each for batch in self._order.evaluation(len(rows)) for each in self._micro_batches(rows, batch, 0)),
            lambda batch: self.loss(model, batch),
            lambda batch: self.count([batch]),
            self._world.sum,
        )
        return {"eval/loss": means["loss"], "eval/perplexity": math.exp(min(means["loss"], 700.0))}

    def state(self) -> dict[str, Any]:
        """Which rows the cursor counts."""
        return {"rows": self._rows.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other rows than those the run began with."""
        self._rows.check_same(state["rows"], self._options.trainer.allow_changes)

    def _micro_batches(self, rows: Sequence[Response], batch: Indices, step: int) -> list[MicroBatch]:
        whole = packed([rows[index] for index in batch], self._rows.pad_id, together=self._options.packing)
        num_rows, width = whole["tokens"].shape
        parts = self._order.fitted([width] * num_rows, None)
        return [{**simplify(_taken(whole, part)), "step": step} for part in parts]


def _taken(whole: dict[str, Tensor], part: Indices) -> dict[str, Tensor]:
    """Some rows of a batch; for a rank without any, one in which nothing counts."""
    if len(part):
        return {name: column[part] for name, column in whole.items()} | {"places": torch.from_numpy(part)}
    dry = {name: column[:1] for name, column in whole.items()}
    nothing = torch.zeros(1, dtype=torch.int64)
    return dry | {"targets": torch.full_like(dry["targets"], IGNORED), "members": nothing, "places": nothing}
