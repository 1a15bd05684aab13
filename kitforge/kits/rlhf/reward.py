"""The task `reward`: a model learns to score what people preferred above what they did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.world import World
from kitforge.data.dialogues import Pair
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.reward import pairwise_loss
from kitforge.kits.rlhf.config import RewardOptions
from kitforge.kits.rlhf.pairs import PairBatches, halves
from kitforge.kits.rlhf.rows import Rows
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.weights import decoder_groups
from kitforge.trainer.callbacks.callback import Callback, Event, Run
from kitforge.trainer.evaluate import weighted_means
from kitforge.trainer.task import Task

# Pairs whose scores tell mean and deviation.
MEASURED = 256


@final
class RewardTask(Task):
    """See `PairBatches` for what a micro-batch holds."""

    def __init__(
        self, options: RewardOptions, rows: Rows[Pair], build: Callable[[World], nn.Module], world: World
    ) -> None:
        self._options = options
        self._rows = rows
        self._build = build
        self._world = world
        self._batches = PairBatches(options, rows, world)

    def build(self, world: World) -> nn.Module:
        """The scalar model, on the device."""
        return self._build(world)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, the head, norms and biases do not."""
        return decoder_groups(model, weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the pairs."""
        return self._batches.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on."""
        return self._batches.steps(cursor)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Pairs."""
        return self._batches.count(step)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sum of the pairs' losses, how many are ordered rightly, half for a tie, and how far apart they are."""
        device = cast(ScalarModel, model).score.weight.device
        chosen, rejected = halves(_scores(model, micro_batch))
        weights, options = micro_batch["weights"].to(device), self._options.reward
        margins = micro_batch["margins"].to(device) if options.use_margins else 0.0
        losses = pairwise_loss(chosen.float(), rejected.float(), margins, options.centre)
        return {
            "loss": (losses * weights).sum(),
            "accuracy": (_is_right(chosen, rejected) * weights).sum(),
            "reward_margin": ((chosen - rejected).detach() * weights).sum(),
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss, eval/accuracy over all pairs, and eval/accuracy/SOURCE for the pairs of each source."""
        if not self._rows.eval:
            return {}
        means = weighted_means(
            self._batches.evaluation(),
            lambda batch: self.loss(model, batch) | self._by_source(model, batch),
            lambda batch: self.count([batch]) | self._counts_by_source(batch),
            self._world.sum,
        )
        return {f"eval/{name}": value for name, value in means.items()}

    def normalise(self, model: nn.Module) -> None:
        """Set mean and deviation of the model to those of its scores of training responses, over all ranks."""
        network, scores, counted = cast(ScalarModel, model), [], []
        with torch.no_grad():
            for batch in self._batches.responses(MEASURED):
                scores.append(_scores(model, batch).double().cpu())
                counted.append(batch["weights"].double().repeat(2))
        values, weights = torch.cat(scores), torch.cat(counted)
        found = self._world.sum({"count": weights.sum(), "sum": (values * weights).sum()})
        mean = found["sum"] / found["count"]
        squares = self._world.sum({"squares": ((values - mean).square() * weights).sum()})["squares"]
        network.mean.copy_(mean)
        network.deviation.copy_((squares / found["count"]).sqrt().clamp(min=1e-6))

    def state(self) -> dict[str, Any]:
        """Which rows the cursor counts."""
        return {"rows": self._rows.fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other rows than those the run began with."""
        self._rows.check_same(state["rows"], self._options.trainer.allow_changes)

    def _by_source(self, model: nn.Module, batch: MicroBatch) -> Sums:
        chosen, rejected = halves(_scores(model, batch))
        right = (_is_right(chosen, rejected) * batch["weights"].to(chosen.device)).cpu()
        return {name: (right * _is_from(batch, source)).sum() for name, source in self._names()}

    def _counts_by_source(self, batch: MicroBatch) -> Sums:
        return {name: (batch["weights"] * _is_from(batch, source)).sum() for name, source in self._names()}

    def _names(self) -> list[tuple[str, str]]:
        return [(f"accuracy/{source}", source) for source in self._batches.sources]


@final
class Normalisation(Callback):
    """Keeps mean and deviation of the scores up to date wherever weights are looked at or saved for good."""

    def __init__(self, task: RewardTask) -> None:
        self._task = task

    def on_event(self, event: Event, run: Run) -> None:
        """Measure at evaluations and at the end."""
        if event.kind in ("evaluate", "end") and run.state.is_settled:
            self._task.normalise(run.model)


def _scores(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Scores [2P] of both responses of each pair, at their last tokens."""
    network = cast(ScalarModel, model)
    device = network.score.weight.device
    return network.at(batch["tokens"].to(device), batch["ends"].to(device))


def _is_right(chosen: Tensor, rejected: Tensor) -> Tensor:
    return ((chosen > rejected).float() + (chosen >= rejected).float()) / 2


def _is_from(batch: MicroBatch, source: str) -> Tensor:
    return torch.tensor([each == source for each in batch["sources"]])
