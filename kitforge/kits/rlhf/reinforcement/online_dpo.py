"""Online DPO (Guo et al., 2024): DPO on pairs of the policy's own completions, of which the rewards prefer one.

The best and the worst completion of a prompt are a pair, by rewards after penalties; of the prompts that an environment
makes of one row, those of the widest margin. Rows whose completions all have the same reward give none; these ties are
counted.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.foundation import seed as seeds
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.on_policy_config import OnlineDPOOptions
from kitforge.kits.rlhf.reinforcement.compared_task import ComparedTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import RolloutBatch, last_index, slice_batch
from kitforge.kits.rlhf.supervised.dpo import preference_sums


class OnlineDPOTask(ComparedTask):
    """The task `online_dpo`. A micro-batch holds rows [2P] of a `RolloutBatch`, the chosen ones first, `weights` [P], 0
    for a padding pair, and `metric_weight`, 1 in the first micro-batch of a rank."""

    ROLE = "reference"
    _options: OnlineDPOOptions

    def _next_batch(self, model: nn.Module, number: int) -> RolloutBatch:
        batch = super()._next_batch(model, number)
        _, has_pair = self._pairs(batch)
        return replace(batch, metrics=batch.metrics | {"frac_ties": 1 - float(has_pair.double().mean())})

    def _pairs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """The rows of the best and the worst completion of each prompt [P, 2], and whether they are a pair [P]."""
        first = batch.mask.int().argmax(dim=1, keepdim=True)
        # Of one completion all advantages are equal; they are exactly 0 where the rewards are but for rounding.
        scores = batch.advantages.gather(1, first).view(-1, self._options.rl.num_generations)
        # An environment may have ended the prompt of each completion in another way.
        texts = batch.prompts(torch.arange(scores.numel()))
        number = {text: index for index, text in enumerate(texts)}
        prompts = torch.tensor([number[each] for each in texts]).view_as(scores)
        is_same = prompts.unsqueeze(2) == prompts.unsqueeze(1)  # [P, N, N]
        margins = torch.where(is_same, scores.unsqueeze(2) - scores.unsqueeze(1), 0.0).flatten(1)
        best = margins.argmax(1, keepdim=True)
        size = scores.shape[1]
        rows = torch.cat([best // size, best % size], dim=1) + size * torch.arange(len(scores)).unsqueeze(1)
        return rows, (margins.amax(1) > 0) & batch.keep_mask[rows].all(1)

    def _micro_batches(self, batch: RolloutBatch, number: int, update: int) -> list[MicroBatch]:
        rl = self._options.rl
        epoch, part = divmod(update, rl.num_minibatches)
        rows, has_pair = self._pairs(batch)
        generator = seeds.generator(self._options.seed, "minibatch", number, epoch)
        prompts = torch.randperm(len(rows), generator=generator).chunk(rl.num_minibatches)[part]
        pairs = rows[prompts[has_pair[prompts]]]
        lengths = [2 * max(last_index(batch.mask[row]) for row in pair) for pair in pairs.tolist()]
        found: list[MicroBatch] = []
        # Without a pair on any rank there is still a padding pair, so that the metrics are logged.
        parts = self._schedule.length_buckets(lengths, rl.max_tokens_per_microbatch)
        for indices in parts or [np.zeros(0, dtype=np.int64)]:
            own = pairs[torch.from_numpy(indices)] if len(indices) else rows[:1]
            weights = torch.full((len(own),), float(len(indices) > 0))
            shared = {"weights": weights, "metrics": batch.metrics, "metric_weight": float(not found)}
            found.append({**slice_batch(batch, own.t().flatten()), **shared})
        return found

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Pairs of this rank's part of the step; metrics of the rollout batch are means over ranks."""
        pairs = torch.stack([each["weights"].sum() for each in step]).sum()
        metrics = dict.fromkeys(step[0]["metrics"], torch.tensor([each["metric_weight"] for each in step]).sum())
        return {"loss": pairs, "samples": pairs, **metrics}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        means = {name: each * micro_batch["metric_weight"] for name, each in micro_batch["metrics"].items()}
        sums = preference_sums(model, micro_batch, self._frozen, self._options.preference)
        return {**sums, **{name: torch.tensor(each, dtype=torch.float64) for name, each in means.items()}}
