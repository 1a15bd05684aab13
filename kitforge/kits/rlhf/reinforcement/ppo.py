"""PPO (Schulman et al., 2017) and its relatives GRPO, Dr. GRPO, DAPO, RLOO and REINFORCE++, from top to bottom.

Each iteration of `RolloutTask.steps`:
  1. collect rollouts: the policy samples completions; they are scored, and get reference log-probs and values
     (`RolloutCollector.collect`);
  2. compute advantages and returns (`compute_experience`);
  3. update: `epochs * num_minibatches` optimizer steps over the rollout batch (`_micro_batches`, `loss`).
Tasks with another loss of rollouts share all but that.
"""

import math
from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.nn.shared_prefix import shares_prefixes
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PromptExample, TokenizedExample
from kitforge.foundation import seed as seeds
from kitforge.foundation.types import IGNORED, Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.advantages import (
    discounted_returns,
    gae_advantages,
    group_advantages,
    masked_whiten,
    token_rewards,
)
from kitforge.kits.rlhf.algorithms.kl import KlController, biased_kl_loss, kl_estimate, kl_loss
from kitforge.kits.rlhf.algorithms.losses import (
    aggregate,
    cispo_loss,
    explained_variance,
    importance_weights,
    loss_denominator,
    mask_fill,
    policy_loss,
    value_loss,
)
from kitforge.kits.rlhf.batching import row_schedule
from kitforge.kits.rlhf.config import CriticOptions, RLOptions
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.reinforcement.echo import echo_count, echo_loss
from kitforge.kits.rlhf.reinforcement.experience import (
    attempt_metrics,
    check_not_diverged,
    completion_outcomes,
    environment_metrics,
    mismatch_metrics,
    rollout_metrics,
    select_groups,
    shaped_scores,
)
from kitforge.kits.rlhf.reinforcement.ptx import PtxBatches, is_ptx, ptx_count, ptx_loss
from kitforge.kits.rlhf.reinforcement.rollout_batch import (
    Rollout,
    RolloutBatch,
    last_index,
    loss_mask,
    pad_rollouts,
    slice_batch,
    target_logprobs,
    to_token_grid,
    token_values,
)
from kitforge.kits.rlhf.reinforcement.rollout_collector import Roles, RolloutCollector
from kitforge.kits.rlhf.roles.model_copy import actor_critic_groups
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.reference_model import check_frozen_weights
from kitforge.kits.rlhf.roles.value_head import critic_of, policy_of
from kitforge.trainer.dataset_task import check_same_rows
from kitforge.trainer.task import BestMetric, Task

# An update may exceed rl.target_kl by this factor, as in OpenAI's baselines and Stable-Baselines3.
TARGET_KL_SLACK = 1.5
# Rollout metrics that an evaluation reports too.
EVAL_METRICS = ("reward", "reward_std", "reward_shaped", "kl", "completion/mean_length", "completion/eos_rate")
EVAL_METRIC_PREFIXES = ("environment/", "rewards/")


class RolloutTask(Task, ABC):
    """A task over rollouts of the policy; it adds its loss. A micro-batch holds ptx rows, or rows of a `RolloutBatch`
    with `is_real` [B], False for padding rows."""

    is_rewarded = True  # False: nothing rewards the completions, and their reward is 0

    def __init__(
        self,
        options: RLOptions,
        rows: DatasetSplits[PromptExample],
        roles: Roles,
        build: Callable[[World], nn.Module],
        world: World,
        pretraining: DatasetSplits[TokenizedExample] | None = None,
    ) -> None:
        """`build` makes the policy, with a critic for GAE; `pretraining` holds the rows of the ptx loss."""
        self._options = options
        self._rows = rows
        # Released after the build, and with it the initial weights.
        self._build: Callable[[World], nn.Module] | None = build
        self._collector = RolloutCollector(options, rows, roles, world)
        self._is_training = world.is_training
        self._schedule = row_schedule(len(rows.train), options, world)
        self._ptx = None if pretraining is None else PtxBatches(options, pretraining, world)
        self._controller = KlController(options.kl)
        self._batch: RolloutBatch | None = None
        self._num_served = 0  # updates begun on the open rollout batch
        self._reads_whole_rows = True  # as a critic does, and a policy without `shares_prefixes`
        self._is_stopped = False  # rl.target_kl ended the open rollout batch early
        self._num_stops = 0  # rollout batches ended early
        self._next_prompt_index = 0  # first prompt of the next rollout batch, in the endless order of prompts
        self.eval_rollouts: list[Rollout] = []  # of the last evaluation
        # Replay: returns the logged rollouts of a rollout batch by its number.
        self.recorded: Callable[[int], list[Rollout]] | None = None
        self.collected: tuple[int, list[Rollout]] | None = None  # number and rollouts of the newest rollout batch
        self.completion_outcomes: list[dict[str, float | None]] = []  # of each of these rollouts

    def build(self, world: World) -> nn.Module:
        """The policy, with a critic for GAE, on the device; a module without parameters on a rank that trains
        nothing."""
        assert self._build is not None
        build, self._build = self._build, None
        return self._collector.prepare(build)

    def on_run_end(self) -> None:
        self._collector.close()

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Updates from the cursor on, with a new rollout batch every `updates_per_rollout` of them; empty ones where
        nothing is trained."""
        number, served = divmod(cursor.step, self._options.rl.updates_per_rollout)
        self._reads_whole_rows = self._options.rl.has_critic or not shares_prefixes(policy_of(model))
        while True:
            if served == 0:
                self._is_stopped = False
                self._batch = self._next_batch(model, number)
            assert self._batch is not None
            for update in range(served, self._options.rl.updates_per_rollout):
                self._num_served = update + 1
                self._collector.mark_stale()
                # Every rollout batch has the same number of steps: a step number determines its rollout batch.
                is_empty = self._is_stopped or not self._is_training
                yield [] if is_empty else self._micro_batches(self._batch, number, update)
            number, served = number + 1, 0

    def _next_batch(self, model: nn.Module, number: int) -> RolloutBatch:
        """Collect rollouts, compute their experience and update the KL controller. Equal on all ranks."""
        options, rl, kl_coef = self._options, self._options.rl, self._controller.coef
        if self.recorded is None:
            rollouts = self._collector.collect(model, number, self._next_prompt_index)
        else:
            rollouts = self.recorded(number)
        batch = compute_experience(rollouts, options, kl_coef, self._rows.pad_id)
        self.collected = (number, rollouts)
        self.completion_outcomes = completion_outcomes(rollouts, batch, options)
        num_prompts = rl.prompts_per_rollout
        if rl.filter_zero_variance_groups:
            num_prompts = select_groups(rollouts, options).num_prompts
        self._next_prompt_index += num_prompts
        if "kl" in batch.metrics:
            self._controller.update(batch.metrics["kl"], len(batch.tokens))
        stops = {} if rl.target_kl is None else {"num_target_kl_stops": float(self._num_stops)}
        return replace(batch, metrics=batch.metrics | {"kl_coef": kl_coef} | stops)

    def dry_cache(self, model: nn.Module) -> list[Tensor]:
        """The keys and values of the engine that would generate now."""
        return self._collector.dry_cache(model)

    def dry_rollouts(self, number: int) -> list[Rollout]:
        """Rollouts that stand in for a rollout batch: completions as long as they may be, with all estimates."""
        size = self._options.rollout.max_new_tokens
        zeros = (0.0,) * size
        return [
            Rollout(
                completion=PromptCompletion(prompt=each.tokens, tokens=(sample,) * size, is_finished=True, columns={}),
                prompt_index=index,
                score=float(sample % 2),
                logprobs=zeros,
                ref_logprobs=zeros,
                values=zeros,
                old_logprobs=zeros,
            )
            for index, each in enumerate(self._collector.prompts(number))
            for sample in range(self._options.rl.num_generations)
        ]

    def _micro_batches(self, batch: RolloutBatch, number: int, update: int) -> list[MicroBatch]:
        """This rank's part of one minibatch. Every epoch shuffles the rollout batch anew."""
        rl = self._options.rl
        epoch, part = divmod(update, rl.num_minibatches)
        generator = seeds.generator(self._options.seed, "minibatch", number, epoch)
        size = len(batch.tokens) // rl.num_minibatches
        rows = torch.randperm(len(batch.tokens), generator=generator)[part * size : (part + 1) * size]
        mask = batch.mask[rows] & batch.keep_mask[rows].unsqueeze(-1)
        # The loop divides by the policy's denominator; the critic's loss is a mean over tokens.
        denominator, warms_up = float(self._loss_denominator(mask, batch.metrics)), number < rl.critic_warmup
        value_scale = denominator / max(float(mask.sum()), 1.0)
        shared = {"metrics": batch.metrics, "value_scale": value_scale, "warms_up": warms_up}
        if rl.echo_coef:
            num_echoed = float(echo_count([slice_batch(batch, rows)])["echo_loss"])
            shared["echo_scale"] = rl.echo_coef * denominator / max(num_echoed, 1.0)
        lengths = [last_index(each) for each in batch.mask[rows]]
        prompts = None if self._reads_whole_rows else batch.prompts(rows)
        parts = self._schedule.length_buckets(lengths, rl.max_tokens_per_microbatch, prompts)
        micro_batches: list[MicroBatch] = [{**slice_batch(batch, rows[indices]), **shared} for indices in parts]
        if self._ptx is None:
            return micro_batches
        # Multiplied by the same denominator, so that the ptx loss is weighted as a mean over its own tokens.
        weight = 0.0 if warms_up else self._options.ptx.coef * denominator
        return micro_batches + self._ptx.micro_batches(number * rl.updates_per_rollout + update, weight)

    def _loss_denominator(self, mask: Tensor, metrics: Mapping[str, float]) -> Tensor:
        # The limit is that of a turn; the metrics of a rollout batch say whether there are several.
        rollout = self._options.rollout
        longest = rollout.max_new_tokens * (rollout.max_turns if "environment/turns" in metrics else 1)
        return loss_denominator(mask, self._options.rl.loss_aggregation, longest)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The loss denominator, generated tokens and completions of this rank's part of the step."""
        tokens, completions, weight = torch.zeros(()), torch.zeros(()), torch.zeros(())
        rollouts = [each for each in step if not is_ptx(each)]
        for micro_batch in rollouts:
            mask = loss_mask(micro_batch)
            tokens, completions = tokens + mask.sum(), completions + micro_batch["is_real"].sum()
            weight = weight + self._loss_denominator(mask, micro_batch["metrics"])
        per_token = dict.fromkeys(("entropy", "clip_fraction", "approx_kl", "value_loss", "tokens"), tokens)
        further = ptx_count(step) | (echo_count(rollouts) if self._options.rl.echo_coef else {})
        return {
            "loss": weight,
            **per_token,
            **dict.fromkeys((*rollouts[0]["metrics"], "samples"), completions),
            **further,
        }

    def surrogate(
        self, micro_batch: MicroBatch, logprobs: Tensor, entropies: Tensor, mask: Tensor
    ) -> tuple[Tensor, Sums]:
        """The policy loss of log-probs [B, T], aggregated as `rl.loss_aggregation` says, and the sums of its
        metrics."""
        options, rl = self._options, self._options.rl
        names = ("old_logprobs", "ref_logprobs", "advantages", "importance_weights")
        grids = [micro_batch[name].to(logprobs) for name in names]
        logprobs, entropies, old, ref, advantages, weights = mask_fill(mask, logprobs, entropies, *grids)
        if rl.loss_mode == "cispo":
            losses, is_clipped = cispo_loss(logprobs, old, advantages, rl.clip, weights)
        else:
            sequence_mask = mask if rl.loss_mode == "gspo" else None
            losses, is_clipped = policy_loss(logprobs, old, advantages, rl.clip, weights, sequence_mask)
        if options.kl.is_on and options.kl.apply_to == "loss":
            losses = losses + micro_batch["metrics"]["kl_coef"] * self._kl_loss(logprobs, ref, old)
        losses = losses - rl.entropy_coef * entropies
        total = aggregate(losses, mask, rl.loss_aggregation, 1.0)
        return total, {
            "policy_loss": total.detach(),
            "entropy": entropies.sum(),
            "clip_fraction": is_clipped.sum(),
            "approx_kl": kl_estimate(old, logprobs, "k3").sum(),
            **batch_means(micro_batch),
        }

    def _kl_loss(self, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """The KL loss of every token [B, T]."""
        if not self._options.kl.use_bias_correction:
            return biased_kl_loss(logprobs, ref_logprobs, self._options.kl.estimator)
        return kl_loss(logprobs, ref_logprobs, self._options.kl.estimator, rollout_logprobs=old_logprobs)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/reward and eval/reward_std before penalties; eval/reward_shaped after them if there are any; mean and
        standard deviation of each reward; eval/completion/mean_length, eval/completion/eos_rate; eval/kl (nats per
        completion) if there is a reference; metrics of the environment; eval/avg@n and eval/pass@k by `rl.eval`."""
        limit, size = self._options.trainer.eval_batches, self._options.rl.prompts_per_rollout
        num_prompts = len(self._rows.eval) if limit is None else min(limit * size, len(self._rows.eval))
        if num_prompts == 0:
            return {}
        rollouts = self.eval_rollouts = self._collector.evaluate(model, num_prompts)
        chosen = self._options.rl.eval
        metrics = compute_experience(rollouts, rl_evaluation_options(self._options), 0.0, self._rows.pad_id).metrics
        kept = {key: metrics[key] for key in metrics if key in EVAL_METRICS or key.startswith(EVAL_METRIC_PREFIXES)}
        if chosen.temperature not in (None, self._options.rollout.temperature):
            # Samples of another temperature do not estimate the KL of the trained policy.
            kept.pop("kl", None)
        kept |= attempt_metrics(rollouts, chosen.num_generations, chosen.pass_threshold)
        return {f"eval/{name}": value for name, value in kept.items()}

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        return actor_critic_groups(model, weight_decay, self._options.critic)

    def data_sizes(self) -> dict[str, int]:
        return {"prompts": len(self._rows.train), "evaluation prompts": len(self._rows.eval)}

    def num_steps(self, epochs: float) -> int | None:
        batches = math.ceil(len(self._rows.train) * epochs / self._options.rl.prompts_per_rollout)
        return batches * self._options.rl.updates_per_rollout

    def epoch(self, cursor: Cursor) -> float | None:
        """Prompts over rows: those drawn with dynamic sampling, else those of the updates so far."""
        rl, num_rows = self._options.rl, len(self._rows.train)
        if rl.filter_zero_variance_groups:
            return self._next_prompt_index / num_rows
        return cursor.step * rl.prompts_per_rollout / (rl.updates_per_rollout * num_rows)

    def needs_checkpoint(self, step: int, max_steps: int) -> bool:
        """Without periodic checkpoints: before the first logged rollout batch, so that its steps can be replayed."""
        kept, per_batch = self._options.rollout.keep_rollout_files, self._options.rl.updates_per_rollout
        first = max(0, -(-max_steps // per_batch) - kept)
        return self._options.trainer.checkpoint_every is None and kept > 0 and step == first * per_batch

    def progress_metrics(self) -> tuple[str, ...]:
        """Reward before penalties, KL and completion length; the value of a policy loss shows no progress."""
        return ("reward", "kl", "completion/mean_length")

    def metric_for_best(self) -> BestMetric:
        """The reward; higher is better."""
        return BestMetric(name="eval/reward", mode="max")

    def state(self) -> dict[str, Any]:
        """Fingerprints of prompts and frozen weights, the KL controller, and the open and prefetched rollouts."""
        is_open = self._batch is not None and self._num_served < self._options.rl.updates_per_rollout
        return {
            "rows": self._rows.fingerprint,
            "num_rows": len(self._rows.train),
            **self._collector.fingerprints(),
            "controller": self._controller.state(),
            "next_prompt": self._next_prompt_index,
            "is_stopped": self._is_stopped,
            "num_stops": self._num_stops,
            "pretraining": None if self._ptx is None else self._ptx.rows.fingerprint,
            "round": self._batch.to_dict() if is_open and self._batch is not None else None,
            "ahead": self._collector.pending(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`. Raises ConfigError for other prompts, another reference or another base model."""
        trainer = self._options.trainer
        check_same_rows(state, {"rows": self._rows.fingerprint}, self._options)
        if self.recorded is None:
            check_frozen_weights(self._collector.fingerprints(), state, trainer.allow_config_changes)
        if self._ptx is not None:
            check_same_rows({"rows": state["pretraining"]}, {"rows": self._ptx.rows.fingerprint}, self._options)
        self._controller.load_state(state["controller"])
        self._next_prompt_index = state["next_prompt"]
        self._is_stopped, self._num_stops = state["is_stopped"], state["num_stops"]
        self._batch = None if state["round"] is None else RolloutBatch.from_dict(state["round"])
        self._collector.restore(state["ahead"])
        self._collector.mark_stale()


class PolicyGradientTask(RolloutTask):
    """The policy gradient task, with a critic for GAE."""

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums of the policy loss, the value loss and their metrics."""
        if is_ptx(micro_batch):
            return ptx_loss(policy_of(model), micro_batch)
        rl, mask = self._options.rl, loss_mask(micro_batch)
        tokens, targets, heat = micro_batch["tokens"], micro_batch["targets"], self._options.rollout.temperature
        echo, hidden = echo_loss(policy_of(model), micro_batch) if rl.echo_coef else (None, None)
        logprobs, entropies = target_logprobs(policy_of(model), tokens, targets, heat, hidden)
        mask = mask.to(logprobs.device)
        total, sums = self.surrogate(micro_batch, logprobs, entropies, mask)
        if echo is not None:
            total, sums["echo_loss"] = total + micro_batch["echo_scale"] * echo, echo.detach()
        if (critic := critic_of(model)) is not None:
            grids = [micro_batch[name].to(logprobs) for name in ("values", "returns")]
            values, old_values, returns = mask_fill(mask, token_values(critic, tokens, mask), *grids)
            sums["value_loss"] = value_loss(values, old_values, returns, rl.value_clip_range).sum()
            weighted_value_loss = rl.vf_coef * micro_batch["value_scale"] * sums["value_loss"]
            # During critic warm-up the policy loss has weight 0, and its zero gradients are dropped.
            total = weighted_value_loss + total * (0.0 if micro_batch["warms_up"] else 1.0)
        return {"loss": total, **sums}

    def frozen_parts(self, step: Sequence[MicroBatch]) -> Collection[str]:
        """The policy during critic warm-up."""
        return ("policy",) if any(each.get("warms_up", False) for each in step) else ()

    def skip_reason(self, sums: Sums, counts: Sums) -> str | None:
        """Skip this update and the rest of the rollout batch if approx_kl exceeds 1.5 * `rl.target_kl`."""
        target = self._options.rl.target_kl
        if target is None:
            return None
        kl = float(sums["approx_kl"]) / max(float(counts["approx_kl"]), 1.0)
        # The training loop handles a non-finite KL: it skips and counts the step.
        if not kl > TARGET_KL_SLACK * target:
            return None
        self._is_stopped, self._num_stops = True, self._num_stops + 1
        return f"approximate KL {kl:.4g} above {TARGET_KL_SLACK} * rl.target_kl={target:g}; rollout batch stopped early"


def batch_means(micro_batch: MicroBatch) -> Sums:
    """Means over the rollout batch as sums over the completions of a micro-batch."""
    return {name: micro_batch["is_real"].sum() * value for name, value in micro_batch["metrics"].items()}


def compute_experience(rollouts: Sequence[Rollout], options: RLOptions, kl_coef: float, pad_id: int) -> RolloutBatch:
    """KL penalties, token rewards, advantages and returns of rollouts; completions of one prompt are adjacent. Pure.
    Raises TrainingError if the policy has diverged."""
    rl = options.rl
    check_not_diverged(rollouts)
    selection = select_groups(rollouts, options) if rl.filter_zero_variance_groups else None
    trained = rollouts if selection is None else [rollouts[index] for index in selection.indices]
    batch = pad_rollouts(trained, pad_id)
    mask = batch["targets"] != IGNORED

    def grid(name: str, default: Tensor) -> Tensor:
        return to_token_grid([getattr(each, name) for each in trained], mask) if getattr(trained[0], name) else default

    drawn = to_token_grid([each.logprobs for each in trained], mask)
    old_logprobs = grid("old_logprobs", drawn)
    ref_logprobs = grid("ref_logprobs", old_logprobs)
    values = grid("values", torch.zeros_like(old_logprobs))
    weights = importance_weights(old_logprobs, drawn, mask, options.importance_sampling)
    scores = shaped_scores(trained, options, mask)
    kl = torch.where(mask, kl_estimate(old_logprobs, ref_logprobs, options.kl.estimator), 0.0)
    penalties = kl_coef * kl if options.kl.apply_to == "reward" else torch.zeros_like(kl)
    keep_mask = torch.tensor([not (rl.mask_truncated_completions and each.completion.is_truncated) for each in trained])
    if selection is not None:
        keep_mask = keep_mask & torch.tensor(selection.has_signal)
    if rl.advantage in ("gae", "reinforce"):
        rewards = token_rewards(scores, penalties, mask)
        advantages, returns = _token_advantages(rewards, values, mask, options)
    else:
        advantages = _group_advantages(scores, penalties, mask, options)
        returns = torch.zeros_like(advantages)
    if rl.whiten_advantages:
        advantages = masked_whiten(advantages, mask & keep_mask.unsqueeze(-1))
    metrics = rollout_metrics(rollouts, options) | environment_metrics(rollouts)
    if trained[0].old_logprobs:
        metrics |= mismatch_metrics(old_logprobs, drawn, mask, weights, options.importance_sampling)
    if trained[0].ref_logprobs:
        metrics["kl"] = float(kl.sum(-1).mean())
    if trained[0].values:
        metrics["explained_variance"] = float(explained_variance(values, returns, mask))
    return RolloutBatch(
        tokens=batch["tokens"],
        targets=batch["targets"],
        old_logprobs=old_logprobs,
        importance_weights=torch.ones_like(old_logprobs) if weights is None else weights,
        ref_logprobs=ref_logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
        keep_mask=keep_mask,
        metrics=metrics,
    )


def _token_advantages(rewards: Tensor, values: Tensor, mask: Tensor, options: RLOptions) -> tuple[Tensor, Tensor]:
    """GAE advantages and the critic's returns, or discounted returns as both (REINFORCE++), [S, T]."""
    rl = options.rl
    if rl.advantage == "reinforce":
        returns = discounted_returns(rewards, mask, rl.gamma)
        return returns, returns
    advantages = gae_advantages(rewards, values, mask, rl.gamma, rl.gae_lambda)
    return advantages, advantages + values


def _group_advantages(scores: Tensor, penalties: Tensor, mask: Tensor, options: RLOptions) -> Tensor:
    """The advantage of each completion among those of its prompt, on all of its tokens [S, T]."""
    whole = scores.sum(-1) if scores.dim() == 2 else scores
    groups = (whole - penalties.sum(-1)).view(-1, options.rl.num_generations)
    assert options.rl.advantage in ("grpo", "dr_grpo", "rloo")
    advantages = group_advantages(groups, options.rl.advantage).flatten()
    return torch.where(mask, advantages.unsqueeze(-1), 0.0)


def rl_evaluation_options(options: RLOptions) -> RLOptions:
    """The options of an evaluation: completions are neither grouped nor filtered."""
    rl = replace(
        options.rl,
        num_generations=1,
        num_minibatches=1,
        advantage="reinforce",
        filter_zero_variance_groups=False,
        max_num_gen_batches=1,
        critic_warmup=0,
    )
    return replace(options, rl=rl, critic=CriticOptions())
