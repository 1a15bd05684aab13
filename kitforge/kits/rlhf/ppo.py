"""The task `ppo` and its relatives: a policy answers prompts, its answers are scored, and it moves towards better ones.

A round of rollouts gives `epochs * minibatches` steps of the one training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.world import World
from kitforge.data.chat_datasets import PromptExample, TokenizedExample
from kitforge.data.packing import IGNORED
from kitforge.foundation import seed as seeds
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.actor_critic import critic_of, policy_of
from kitforge.kits.rlhf.algorithms.kl import biased_kl_loss, kl_estimate, kl_loss
from kitforge.kits.rlhf.algorithms.kl_controllers import kl_controller
from kitforge.kits.rlhf.algorithms.loss_aggregation import aggregate, loss_denominator, mask_fill
from kitforge.kits.rlhf.algorithms.losses import cispo_loss, policy_loss, value_loss
from kitforge.kits.rlhf.batching import row_schedule
from kitforge.kits.rlhf.config import CriticOptions, RLOptions
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.experience import completion_outcomes, compute_experience, select_groups
from kitforge.kits.rlhf.model_copy import actor_critic_groups
from kitforge.kits.rlhf.ptx import PtxBatches, is_ptx, ptx_count, ptx_loss
from kitforge.kits.rlhf.reference_model import check_frozen_weights
from kitforge.kits.rlhf.rollout_batch import Rollout, RolloutBatch, token_logprobs, token_values
from kitforge.kits.rlhf.rollout_collector import Roles, RolloutCollector
from kitforge.kits.rlhf.rollout_metrics import attempt_metrics
from kitforge.trainer.task import BestMetric, RunResult, Task


@final
class PolicyGradientTask(Task):
    """A micro-batch: rows of a `RolloutBatch` and `is_present` [B], False for padding rows; or pretraining rows."""

    def __init__(
        self,
        options: RLOptions,
        rows: DatasetSplits[PromptExample],
        roles: Roles,
        build: Callable[[World], nn.Module],
        world: World,
        pretraining: DatasetSplits[TokenizedExample] | None = None,
    ) -> None:
        """`build` makes what is trained, the policy and a critic where there is one; `pretraining` is text that the
        policy must not forget."""
        self._options = options
        self._rows = rows
        # Let go once it has built, and with it the weights that it began with.
        self._build: Callable[[World], nn.Module] | None = build
        self._collector = RolloutCollector(options, rows, roles, world)
        self._schedule = row_schedule(len(rows.train), options, world)
        self._ptx = None if pretraining is None else PtxBatches(options, pretraining, world)
        self._controller = kl_controller(options.kl.controller_options())
        self._batch: RolloutBatch | None = None
        self._num_served = 0
        self._is_stopped = False  # the open round has ended early
        self._num_stops = 0  # rounds that did
        self._next_prompt_index = 0  # in the endless order of prompts, where the next round begins
        self.eval_rollouts: list[Rollout] = []  # the answers of the last evaluation
        # A round's answers by its number, where they are already known.
        self.recorded: Callable[[int], list[Rollout]] | None = None
        self.collected: tuple[int, list[Rollout]] | None = None  # the newest round's number, and its answers
        self.completion_outcomes: list[dict[str, float | None]] = []  # of each of these answers, see `outcomes`

    def build(self, world: World) -> nn.Module:
        """The policy, with a critic where there is one, on the device."""
        build, self._build = self._build, None
        assert build is not None
        model = build(world)
        # What answers, and looks at answers, where the trained networks lie in pieces.
        self._collector.prepare(build, model)
        return model

    def serve_roles(self) -> RunResult:
        """On a rank that trains nothing: do its part in what the others ask for, until they end."""
        build, self._build = self._build, None
        assert build is not None
        self._collector.prepare(build, None)
        del build
        return self._collector.serve()

    def on_run_end(self, ending: RunResult) -> None:
        """Let the ranks go that attend."""
        self._collector.close(ending)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, heads, norms and biases do not."""
        return actor_critic_groups(model, weight_decay, self._options.critic)

    def num_steps(self, epochs: float) -> int | None:
        """Updates in that many passes over the prompts."""
        rounds = math.ceil(len(self._rows.train) * epochs / self._options.rl.prompts_per_rollout)
        return rounds * self._options.rl.updates_per_rollout

    def needs_checkpoint(self, step: int, max_steps: int) -> bool:
        """Where nothing but the end of the run is to be saved: before the last of the rounds whose answers are kept, so
        that their steps can be replayed."""
        kept, per_round = self._options.rollout.keep_rollout_files, self._options.rl.updates_per_rollout
        first = max(0, -(-max_steps // per_round) - kept)
        return self._options.trainer.checkpoint_every is None and kept > 0 and step == first * per_round

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Updates from the cursor on, with new answers for each round."""
        number, served = divmod(cursor.step, self._options.rl.updates_per_rollout)
        while True:
            if served == 0:
                self._is_stopped = False
                self._batch = self._collect_batch(model, number)
            assert self._batch is not None
            for within in range(served, self._options.rl.updates_per_rollout):
                self._num_served = within + 1
                self._collector.mark_stale()
                # A round has as many steps as ever, so that the step tells the round; those left of it are empty.
                yield [] if self._is_stopped else self._micro_batches(self._batch, number, within)
            number, served = number + 1, 0

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """What divides the loss, generated tokens and answers of this rank's part."""
        tokens, answers, weight = torch.zeros(()), torch.zeros(()), torch.zeros(())
        for micro_batch in (each for each in step if not is_ptx(each)):
            mask = loss_mask(micro_batch)
            tokens, answers = tokens + mask.sum(), answers + micro_batch["is_real"].sum()
            weight = weight + self._loss_denominator(mask)
        of_tokens = dict.fromkeys(("entropy", "clip_fraction", "approx_kl", "value_loss", "tokens"), tokens)
        figures = next(each["metrics"] for each in step if not is_ptx(each))
        of_answers = dict.fromkeys((*figures, "samples"), answers)
        return {"loss": weight, **of_tokens, **of_answers, **ptx_count(step)}

    def frozen_parts(self, step: Sequence[MicroBatch]) -> Collection[str]:
        """The policy, while the critic warms up."""
        return ("policy",) if any(each.get("warms_up", False) for each in step) else ()

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the policy's losses, weighed as `rl.loss_aggregation` says, and of the critic's."""
        if is_ptx(micro_batch):
            return ptx_loss(policy_of(model), micro_batch)
        options, mask = self._options, loss_mask(micro_batch)
        batch = {name: micro_batch[name] for name in ("tokens", "targets")}
        log_probs, entropies = token_logprobs(policy_of(model), **batch, temperature=options.rollout.temperature)
        mask = mask.to(log_probs.device)
        grids = [
            micro_batch[name].to(log_probs)
            for name in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights")
        ]
        log_probs, entropies, old_logprobs, ref_logprobs, advantages, weights = mask_fill(
            mask, log_probs, entropies, *grids
        )
        mode, clip = options.rl.loss_mode, options.rl.clip
        if mode == "cispo":
            losses, is_clipped = cispo_loss(log_probs, old_logprobs, advantages, clip, weights)
        else:
            losses, is_clipped = policy_loss(
                log_probs, old_logprobs, advantages, clip, weights, mask if mode == "gspo" else None
            )
        if options.kl.is_on and options.kl.apply_to == "loss":
            away = self._kl_loss(log_probs, ref_logprobs, old_logprobs)
            losses = losses + micro_batch["metrics"]["kl_coef"] * away
        losses = losses - options.rl.entropy_coef * entropies
        total = aggregate(losses, mask, options.rl.loss_aggregation, 1.0)
        sums = {
            "policy_loss": total.detach(),
            "entropy": entropies.sum(),
            "clip_fraction": is_clipped.sum(),
            "approx_kl": kl_estimate(old_logprobs, log_probs, "k3").sum(),
            # Means over the round as sums over this micro-batch's answers.
            **{name: micro_batch["is_real"].sum() * value for name, value in micro_batch["metrics"].items()},
        }
        if (critic := critic_of(model)) is not None:
            values, before, wanted = mask_fill(
                mask, token_values(critic, batch["tokens"], mask), *(micro_batch[name].to(log_probs) for name in CRITIC)
            )
            errors, _ = value_loss(values, before, wanted, options.rl.value_clip_range)
            sums["value_loss"] = errors.sum()
            critical = options.rl.vf_coef * micro_batch["value_scale"] * sums["value_loss"]
            # While it warms up the policy's part has weight 0; its gradients, which are 0, are let go.
            total = critical + total * (0.0 if micro_batch["warms_up"] else 1.0)
        return {"loss": total, **sums}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/reward and eval/reward_std before penalties; eval/reward_shaped after them if there are any; mean and
        standard deviation of each reward; eval/completion/mean_length, eval/completion/eos_rate; eval/kl (nats per
        completion) if there is a reference; metrics of the environment; eval/avg@n and eval/pass@k by `rl.eval`."""
        limit, size = self._options.trainer.eval_batches, self._options.rl.prompts_per_rollout
        num_prompts = len(self._rows.eval) if limit is None else min(limit * size, len(self._rows.eval))
        if num_prompts == 0:
            return {}
        rollouts = self.eval_rollouts = self._collector.collect_evaluation(model, num_prompts)
        chosen = self._options.rl.eval
        figures = compute_experience(rollouts, evaluation_options(self._options), 0.0, self._rows.pad_id).metrics
        # Answers of another temperature are no sample of the policy that is trained, and tell no divergence.
        other = {"kl"} if chosen.temperature not in (None, self._options.rollout.temperature) else set()
        kept = {
            name: each
            for name, each in figures.items()
            if name in EVAL_METRICS or name.startswith(EVAL_METRIC_PREFIXES)
        }
        kept |= attempt_metrics(rollouts, chosen.num_generations, chosen.pass_threshold)
        return {f"eval/{name}": each for name, each in kept.items() if name not in other}

    def progress_metrics(self) -> tuple[str, ...]:
        """Reward before penalties, distance from the reference, and length; the loss of a policy tells nothing."""
        return ("reward", "kl", "completion/mean_length")

    def skip_reason(self, sums: Sums, counts: Sums) -> str | None:
        """`rl.target_kl`: beyond 1.5 times it this update and those that the round has left are not made."""
        target = self._options.rl.target_kl
        if target is None:
            return None
        kl = float(sums["approx_kl"]) / max(float(counts["approx_kl"]), 1.0)
        # What is not finite is skipped, and counted, as a step that is not.
        if not kl > TARGET_KL_SLACK * target:
            return None
        self._is_stopped, self._num_stops = True, self._num_stops + 1
        return f"approximate KL {kl:.4g} above {TARGET_KL_SLACK} * rl.target_kl={target:g}; the round ends here"

    def metric_for_best(self) -> BestMetric:
        """The reward, of which more is better."""
        return BestMetric(name="eval/reward", mode="max")

    def state(self) -> dict[str, Any]:
        """The prompts, the reference, what a nat costs, and the answers of a round that is not over."""
        is_open = self._batch is not None and self._num_served < self._options.rl.updates_per_rollout
        return {
            "rows": self._rows.fingerprint,
            "num_rows": len(self._rows.train),
            **self._collector.fingerprints(),
            "controller": self._controller.state(),
            "next_prompt": self._next_prompt_index,
            "is_stopped": self._is_stopped,
            "num_stops": self._num_stops,
            "pretraining": None if self._ptx is None else self._ptx.fingerprint,
            "round": self._batch.to_dict() if is_open and self._batch is not None else None,
            "ahead": self._collector.pending(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take it back; refuse to go on with other prompts or another reference or base than the run began with."""
        trainer = self._options.trainer
        self._rows.check_same(state["rows"], trainer.allow_data_changes)
        if self.recorded is None:
            check_frozen_weights(self._collector.fingerprints(), state, trainer.allow_config_changes)
        if self._ptx is not None:
            self._ptx.check_same(state["pretraining"], trainer.allow_data_changes)
        self._controller.load_state(state["controller"])
        self._next_prompt_index = state["next_prompt"]
        self._is_stopped, self._num_stops = state["is_stopped"], state["num_stops"]
        self._batch = None if state["round"] is None else RolloutBatch.from_dict(state["round"])
        self._collector.restore(state["ahead"])
        self._collector.mark_stale()

    def _collect_batch(self, model: nn.Module, number: int) -> RolloutBatch:
        """Answers to the round's prompts, judged, the same on all ranks."""
        if self.recorded is None:
            drawn = self._collector.collect(model, number, self._next_prompt_index)
        else:
            drawn = self.recorded(number)
        self.collected = (number, drawn)
        coefficient, rl = self._controller.coef, self._options.rl
        found = compute_experience(drawn, self._options, coefficient, self._rows.pad_id)
        self.completion_outcomes = completion_outcomes(drawn, found, self._options)
        self._next_prompt_index += (
            select_groups(drawn, self._options).num_prompts
            if rl.filter_zero_variance_groups
            else rl.prompts_per_rollout
        )
        if "kl" in found.metrics:
            self._controller.update(found.metrics["kl"], len(found.tokens))
        stops = {} if rl.target_kl is None else {"num_target_kl_stops": float(self._num_stops)}
        return replace(found, metrics=found.metrics | {"kl_coef": coefficient} | stops)

    def _kl_loss(self, log_probs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        """From the reference, as a loss for every token [B, T]."""
        if not self._options.kl.use_bias_correction:
            return biased_kl_loss(log_probs, ref_logprobs, self._options.kl.estimator)
        return kl_loss(log_probs, ref_logprobs, self._options.kl.estimator, rollout_logprobs=old_logprobs)

    def _micro_batches(self, batch: RolloutBatch, number: int, within: int) -> list[MicroBatch]:
        """One update's answers: a part of those of the round, in an order of their own for each pass."""
        rl = self._options.rl
        epoch, part = divmod(within, rl.num_minibatches)
        noise = seeds.generator(self._options.seed, "minibatch", number, epoch)
        size = len(batch.tokens) // rl.num_minibatches
        rows = torch.randperm(len(batch.tokens), generator=noise)[part * size : (part + 1) * size]
        mask = batch.mask[rows] & batch.keep_mask[rows].unsqueeze(-1)
        # The loop divides by the policy's denominator; the critic's loss is a mean over tokens.
        denominator, warms_up = float(self._loss_denominator(mask)), number < rl.critic_warmup
        scale = denominator / max(float(mask.sum()), 1.0)
        plain = {"metrics": batch.metrics, "value_scale": scale, "warms_up": warms_up}
        parts = self._schedule.length_buckets(
            [_last_index(each) for each in batch.mask[rows]], rl.max_tokens_per_microbatch
        )
        answers: list[MicroBatch] = [{**slice_batch(batch, rows[indices]), **plain} for indices in parts]
        if self._ptx is None:
            return answers
        # The same denominator again, so that what it weighs is the mean over its own tokens.
        weight = 0.0 if warms_up else self._options.ptx.coef * denominator
        return answers + self._ptx.micro_batches(number * rl.updates_per_rollout + within, weight)

    def _loss_denominator(self, mask: Tensor) -> Tensor:
        return loss_denominator(mask, self._options.rl.loss_aggregation, self._options.rollout.max_new_tokens)


def evaluation_options(options: RLOptions) -> RLOptions:
    """The options for answers that are looked at one by one."""
    rl = replace(
        options.rl,
        num_generations=1,
        num_minibatches=1,
        advantage="reinforce",
        filter_zero_variance_groups=False,
        max_num_gen_batches=1,
        length_adaptive_alpha=None,
        critic_warmup=0,
    )
    return replace(options, rl=rl, critic=CriticOptions())


def slice_batch(batch: RolloutBatch, rows: Tensor) -> dict[str, Tensor]:
    """Some answers, as wide as the longest of them; for a rank without any, one that counts for nothing."""
    chosen = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
    width = _last_index(batch.mask[chosen].any(0))
    grids = {name: getattr(batch, name)[chosen, :width] for name in GRIDS}
    is_present = torch.ones(len(chosen), dtype=torch.bool) if len(rows) else torch.zeros(1, dtype=torch.bool)
    return {**grids, "keep_mask": batch.keep_mask[chosen] & is_present, "is_real": is_present}


def _last_index(mask: Tensor) -> int:
    """Tokens of a row, or of several on top of one another, by where it is True [T] that the next one is learnt."""
    return int(mask.nonzero().max()) + 2 if mask.any() else 1


def loss_mask(micro_batch: MicroBatch) -> Tensor:
    """True [B, T] at the tokens that count."""
    mask: Tensor = (micro_batch["targets"] != IGNORED) & micro_batch["keep_mask"].unsqueeze(-1)
    return mask


# Grids of a round that a micro-batch takes rows of; those that the critic's loss reads.
GRIDS = ("tokens", "targets", "old_logprobs", "ref_logprobs", "values", "advantages", "returns", "importance_weights")
CRITIC = ("values", "returns")
# By how much an update may exceed rl.target_kl, as in the PPO of OpenAI's baselines and of Stable-Baselines3.
TARGET_KL_SLACK = 1.5
# Figures of a round that an evaluation has too.
EVAL_METRICS = ("reward", "reward_std", "reward_shaped", "kl", "completion/mean_length", "completion/eos_rate")
EVAL_METRIC_PREFIXES = ("environment/", "rewards/")
