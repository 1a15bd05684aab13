"""The task `reward`: a reward model on preference pairs (Bradley-Terry loss)."""

from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.foundation.device import copy_to
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference_losses import pairwise_loss
from kitforge.kits.rlhf.batching import split_pairs
from kitforge.kits.rlhf.config import RewardOptions
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.kits.rlhf.supervised.example_task import PairTask
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext, can_save_at_end

# Training pairs for the mean and standard deviation of the scores.
NORMALIZATION_PAIRS = 256


class RewardTask(PairTask[RewardOptions]):
    """Reward modelling with the Bradley-Terry loss."""

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums of loss, accuracy (a tie counts half) and margin of the pairs."""
        device = cast(ValueHeadModel, model).score.weight.device
        chosen, rejected = split_pairs(_scores(model, micro_batch))
        weights, options = micro_batch["weights"].to(device), self._options.reward
        margins = micro_batch["margins"].to(device) if options.use_margins else 0.0
        losses = pairwise_loss(chosen.float(), rejected.float(), margins, options.center_coefficient)
        return {
            "loss": (losses * weights).sum(),
            "rewards/accuracy": (_ranking_accuracy(chosen, rejected) * weights).sum(),
            "rewards/margins": ((chosen - rejected).detach() * weights).sum(),
        }

    def eval_sums(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the loss, and the accuracy by source."""
        chosen, rejected = split_pairs(_scores(model, micro_batch))
        right = (_ranking_accuracy(chosen, rejected) * micro_batch["weights"].to(chosen.device)).cpu()
        return self.loss(model, micro_batch) | self._sums_by_source(micro_batch, right)

    def eval_counts(self, micro_batch: MicroBatch) -> Sums:
        """Pairs, and those of each source."""
        return self.count([micro_batch]) | self._sums_by_source(micro_batch, micro_batch["weights"])

    def normalize(self, model: nn.Module) -> None:
        """Set mean and deviation of the model to those of its scores of training completions, over all ranks."""
        network, scores, counted = cast(ValueHeadModel, model), [], []
        rows, mixture = self._rows.train, self._rows.mixture
        chosen = range(min(NORMALIZATION_PAIRS, len(rows))) if mixture is None else mixture.rows(0, NORMALIZATION_PAIRS)
        with torch.no_grad():
            for batch in self.micro_batches(model, [rows[index] for index in chosen], 0):
                scores.append(_scores(model, batch).double().cpu())
                counted.append(batch["weights"].double().repeat(2))
        values, weights = torch.cat(scores), torch.cat(counted)
        found = self._world.sum({"count": weights.sum(), "sum": (values * weights).sum()})
        mean = found["sum"] / found["count"]
        squares = self._world.sum({"squares": ((values - mean).square() * weights).sum()})["squares"]
        network.mean.copy_(mean)
        network.deviation.copy_((squares / found["count"]).sqrt().clamp(min=1e-6))

    @cached_property
    def _sources(self) -> list[str]:
        return sorted({pair.source for pair in self._rows.eval if pair.source})

    def _sums_by_source(self, batch: MicroBatch, values: Tensor) -> Sums:
        """Sums of values of pairs [P] by the source of the pair."""
        masks = {source: torch.tensor([each == source for each in batch["sources"]]) for source in self._sources}
        return {f"rewards/accuracy/{source}": (values * mask).sum() for source, mask in masks.items()}


class NormalizeRewards(Callback):
    """Updates mean and standard deviation of the scores before evaluations and checkpoints."""

    def __init__(self, task: RewardTask) -> None:
        self._task = task

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind in ("evaluate", "checkpoint") or can_save_at_end(event, run):
            self._task.normalize(run.model)
            run.state.parallel.reshard()


def _scores(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Scores [2P] of both completions of each pair, at their last tokens."""
    network = cast(ValueHeadModel, model)
    device = network.score.weight.device
    return network.scores_at(copy_to(batch["tokens"], device), copy_to(batch["ends"], device))


def _ranking_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    return ((chosen > rejected).float() + (chosen >= rejected).float()) / 2
