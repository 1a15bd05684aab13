"""On-policy distillation (Agarwal et al., 2024, GKD; Lu, 2025): at each token of its own completions the student learns
the whole distribution of the teacher, which reads the same tokens.

The teacher is frozen, in evaluation mode and sharded like the policy. It runs within the loss, on the rows of the
micro-batch, so only hidden states of one micro-batch are kept and no log-probs are exchanged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.core.parallel.world import World
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.distillation import STATISTICS, Divergence, Heads, linear_divergence
from kitforge.kits.rlhf.on_policy_config import DistillOptions
from kitforge.kits.rlhf.reinforcement.compared_task import ComparedTask
from kitforge.kits.rlhf.reinforcement.ppo import batch_means, compute_experience, rl_evaluation_options
from kitforge.kits.rlhf.reinforcement.ptx import is_ptx, ptx_loss
from kitforge.kits.rlhf.reinforcement.rollout_batch import RolloutBatch, last_index, loss_mask, slice_batch
from kitforge.kits.rlhf.reinforcement.teacher import TeacherRows
from kitforge.kits.rlhf.roles.value_head import policy_of
from kitforge.trainer.metric_means import weighted_means
from kitforge.trainer.task import BestMetric

# The metrics of `STATISTICS`, in nats per token but for the fraction of tokens whose likeliest one is the teacher's.
METRICS = tuple(name if name == "entropy" else f"distill/{name}" for name in STATISTICS)
# First tokens of the parts of a completion whose reverse KL is logged separately: loops at its end hide in the mean.
PARTS = (1, 17, 65, 257, 1025)


class DistillTask(ComparedTask):
    """The task `distill`."""

    ROLE = "teacher"
    _options: DistillOptions

    def build(self, world: World) -> nn.Module:
        """See `ComparedTask`; and the rows that the teacher reads."""
        model, prompts = super().build(world), chain(self._rows.train, self._rows.eval)
        if self._frozen.model is not None:
            room = cast(CausalLM, self._frozen.model).geometry.max_length - self._options.rollout.max_new_tokens
            self._teacher_rows = TeacherRows(prompts, room, self._rows.pad_id)
        return model

    @property
    def _divergence(self) -> Divergence:
        beta, temperature = self._options.distill.beta, self._options.rollout.temperature
        return Divergence(beta=beta, temperature=temperature, num_ids=self._num_ids)

    def _next_batch(self, model: nn.Module, number: int) -> RolloutBatch:
        batch = super()._next_batch(model, number)
        return batch if self.is_rewarded else replace(batch, metrics=_unrewarded(batch.metrics))

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """See `RolloutTask`; and the tokens of each part of the completions."""
        found = super().count(step)
        masks = [loss_mask(each) for each in step if not is_ptx(each)]
        found |= dict.fromkeys(METRICS, found["tokens"])
        per_part = [_by_part(mask.cumsum(-1)[mask], torch.ones(int(mask.sum()))) for mask in masks]
        return found | {name: torch.stack([each[name] for each in per_part]).sum() for name in per_part[0]}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums of the divergence and its statistics over tokens; with `distill.reward_coef` also of the policy loss."""
        if is_ptx(micro_batch):
            return ptx_loss(policy_of(model), micro_batch)
        student, coef = cast(CausalLM, policy_of(model)), self._options.distill.reward_coef
        hidden = hidden_at(student, micro_batch["tokens"], loss_mask(micro_batch))
        total, sums = self._divergence_sums(student, hidden, micro_batch)
        if not coef:
            return {"loss": total, **sums, **batch_means(micro_batch)}
        # The policy loss is of the same hidden states; its log-probs are over the tokenizer's ids.
        mask, targets = (copy_to(each, hidden.device) for each in (loss_mask(micro_batch), micro_batch["targets"]))
        # A vocabulary-parallel shard has fewer rows.
        weight = student.head_weight[: self._divergence.num_ids]
        found = student.kernels.linear_log_probs(hidden, weight, targets[mask], self._divergence.temperature)
        grids = [torch.zeros_like(targets, dtype=each.dtype).masked_scatter(mask, each) for each in found]
        gradient, further = self.surrogate(micro_batch, grids[0], grids[1], mask)
        return {"loss": total + coef * gradient, **further, **sums}

    def _divergence_sums(self, student: CausalLM, hidden: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Sums]:
        """The sum of the divergences, aggregated as `rl.loss_aggregation` says, of the student's hidden states at the
        counted tokens [N, dim], and of their statistics."""
        teacher, tokens, mask = cast(CausalLM, self._frozen.model), micro_batch["tokens"], loss_mask(micro_batch)
        with torch.no_grad():
            teacher_hidden = hidden_at(teacher, *self._teacher_rows.of(tokens, mask))
        heads = Heads(student=student.head, teacher=teacher.head, teacher_hidden=teacher_hidden)
        weights = torch.ones(mask.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        if self._options.rl.loss_aggregation == "seq-mean-token-mean":
            weights /= mask.sum(-1, keepdim=True).clamp(min=1)
        weights, positions = (copy_to(each[mask], hidden.device) for each in (weights, mask.cumsum(-1)))
        total, statistics = linear_divergence(hidden, student.head_weight, weights, heads, self._divergence)
        self._frozen.reshard()
        sums = {"distill/loss": total.detach(), **dict(zip(METRICS, statistics.sum(-1), strict=True))}
        return total, sums | _by_part(positions, statistics[0])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `RolloutTask`; and eval/distill/NAME, eval/entropy of the same completions."""
        found = super().evaluate(model)
        if not found:
            return {}
        batches = self._eval_micro_batches() if self._is_training else ()
        means = weighted_means(batches, partial(self.loss, model), lambda one: self.count([one]), self._world.sum)
        # A part that no completion reaches has no mean.
        own = {name: each for name, each in means.items() if name.startswith(("distill/", "entropy"))}
        kept = {f"eval/{name}": each for name, each in own.items() if math.isfinite(each) or name in METRICS}
        shared: dict[str, float] = self._world.broadcast_object(kept)
        return (found if self.is_rewarded else _unrewarded(found)) | shared

    def _eval_micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's part of the completions of the last evaluation."""
        options = rl_evaluation_options(self._options)
        batch = compute_experience(self.eval_rollouts, options, 0.0, self._rows.pad_id)
        lengths = [last_index(each) for each in batch.mask]
        every = torch.arange(len(lengths))
        most = self._options.rl.max_tokens_per_microbatch
        for indices in self._schedule.length_buckets(lengths, most, batch.prompts(every)):
            yield {**slice_batch(batch, every[indices]), "metrics": {}}

    def progress_metrics(self) -> tuple[str, ...]:
        """The divergence, and the reward if there is one."""
        return ("loss", "reward", "completion/mean_length")

    def metric_for_best(self) -> BestMetric:
        """The divergence; lower is better."""
        return BestMetric(name="eval/distill/loss", mode="min")


def _by_part(positions: Tensor, values: Tensor) -> Sums:
    """Sums of values [N] by the part of the completion that they are in, of their positions in it [N] from 1."""
    bounds = torch.tensor(PARTS[1:], device=positions.device)
    sums = torch.zeros(len(PARTS), dtype=values.dtype, device=values.device)
    sums.index_add_(0, torch.bucketize(positions, bounds, right=True), values)
    return {f"distill/reverse_kl/from_{first}": each for first, each in zip(PARTS, sums, strict=True)}


def _unrewarded(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those of a reward that nothing gives."""
    names = ("reward", "frac_reward_zero_std", "avg@", "pass@")
    return {name: each for name, each in metrics.items() if not name.removeprefix("eval/").startswith(names)}
