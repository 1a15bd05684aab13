"""Collects rollouts: samples, scores and estimates them, each step on the ranks of its role."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import current_thread, main_thread
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.shared_prefix import shares_prefixes
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PromptExample
from kitforge.data.schedule import shuffled_indices
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.progress import show_progress
from kitforge.foundation.types import IGNORED
from kitforge.inference.capacity import num_cache_blocks
from kitforge.inference.engine import Engine
from kitforge.inference.paged_attention import KeyValueCache
from kitforge.kits.network_source import copy_model
from kitforge.kits.rlhf.batching import forward_batches
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.async_rollouts import AsyncRollouts
from kitforge.kits.rlhf.reinforcement.environment import EnvironmentRunner
from kitforge.kits.rlhf.reinforcement.experience import select_groups
from kitforge.kits.rlhf.reinforcement.openenv import close_sessions
from kitforge.kits.rlhf.reinforcement.rollout_batch import (
    Rollout,
    from_state,
    generate_rollouts,
    pad_rollouts,
    prompt_bytes,
    target_logprobs,
    to_state,
    token_values,
)
from kitforge.kits.rlhf.roles.placement import RolePlacement
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel
from kitforge.kits.rlhf.roles.rewards import Scorer
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, critic_of, policy_of
from kitforge.trainer.precision import autocast

# For each rollout the fields that a role fills in.
Annotator: TypeAlias = Callable[[Sequence[Rollout]], Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles on this rank other than the trained models."""

    scorer: Scorer | None  # None: the environment gives the rewards
    environment_runner: EnvironmentRunner | None = None  # runs episodes of several turns
    event_loop: EventLoop = field(default_factory=EventLoop)  # of async rewards and environments
    reference_model: ReferenceModel  # its model is None without a KL coefficient or kl.measure
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer  # shared by policy and reference
    is_rewarded: bool = True  # False: no role gives a reward, which is 0
    compared: ReferenceModel | None = None  # of the loss, which reads no ids beyond the tokenizer's


class RolloutCollector:
    """Samples, scores and estimates rollouts, each step on the ranks of its role; the results are all-gathered.

    All ranks call every public method together, those that train nothing included.
    """

    def __init__(self, options: RLOptions, rows: DatasetSplits[PromptExample], roles: Roles, world: World) -> None:
        self._options = options
        self._rows = rows
        self._roles = roles
        self._world = world
        self._placement = RolePlacement(options.role_ranks, world)
        self._rollout_model: nn.Module | None = None  # a whole copy, where the trained model is sharded or elsewhere
        self._is_stale = True
        self._fingerprint_cache: dict[str, Any] | None = None
        staleness = options.rollout.max_staleness
        copy = partial(copy_model, device=world.device, level=options.compile_level)
        is_async = staleness > 0 and self._placement.has("rollout")
        self._async = AsyncRollouts(staleness, self._sample_batch, copy) if is_async else None

    def prepare(self, build: Callable[[World], nn.Module]) -> nn.Module:
        """The trained model, without parameters on a rank that trains nothing. Builds the rollout model unless it is
        the trained one, and casts frozen models to the run's precision."""
        is_training = self._world.is_training
        model = build(self._world) if is_training else nn.Module()
        if self._placement.has("rollout") and (self._world.is_sharded or not is_training):
            self._rollout_model = build(World(device=self._world.device))
        built = [model] if self._rollout_model is None else [model, self._rollout_model]
        self._roles.reference_model.hold_in(self._options.precision, nn.ModuleList(built))
        return model

    def dry_cache(self, model: nn.Module) -> list[Tensor]:
        """The keys and values of an engine, for plans. None without rollout.engine.kv_cache_bytes on an accelerator,
        where they take half of what is free."""
        options, policy = self._options.rollout.engine_options, policy_of(self._rollout_model or model)
        if not self._placement.has("rollout") or (options.kv_cache_bytes is None and self._world.device_type != "cpu"):
            return []
        network = cast(CausalLM, policy)
        geometry, size = network.geometry, options.block_size
        cache = KeyValueCache(num_cache_blocks(network, options), size)
        key = network.head_weight.new_empty(1, geometry.num_kv_heads, 1, geometry.head_dim)
        return [each for layer in range(geometry.num_layers) for each in cache.layer(layer, key)]

    def mark_stale(self) -> None:
        """The trained weights change: sync them before the next generation."""
        self._is_stale = True

    def collect(self, model: nn.Module, number: int, first: int) -> list[Rollout]:
        """The rollouts of the prompts from `first` on, with rewards, reference log-probs and values, equal on all
        ranks. Those that `select_groups` filters out have a reward only."""
        model_here, rl = self._synced(model), self._options.rl
        if not rl.filter_zero_variance_groups:
            own: list[Rollout] = []
            if model_here is not None:
                sample = self._sample_batch if self._async is None else self._async.collect
                own = sample(policy_of(model_here), number)
            rollouts = self._all_gather(own)
            return self._annotate(rollouts, self._unscored(rollouts, self.prompts(first)) | self._estimates(model_here))
        # Dynamic sampling (DAPO): generate for further prompts until enough groups have different rewards.
        rollouts = []
        for batch in range(rl.max_num_gen_batches):
            offset = batch * rl.prompts_per_rollout
            prompts = self.prompts(first + offset)
            key = f"{self._options.seed}/{number}" + (f"/{batch}" if batch else "")
            sampled = self._all_gather(self._sample(model_here, prompts, key, rl.num_generations))
            scored = self._annotate(sampled, self._unscored(sampled, prompts))
            rollouts += [replace(each, prompt_index=offset + each.prompt_index) for each in scored]
            selection = select_groups(rollouts, self._options)
            if selection.is_full:
                break
        selected = self._annotate([rollouts[index] for index in selection.indices], self._estimates(model_here))
        for index, rollout in zip(selection.indices, selected, strict=True):
            rollouts[index] = rollout
        return rollouts

    def evaluate(self, model: nn.Module, num_prompts: int) -> list[Rollout]:
        """The rollouts of the first evaluation prompts, generated as `rl.eval` says."""
        model_here, chosen, prompts = self._synced(model), self._options.rl.eval, self._rows.eval[:num_prompts]
        own = self._sample(model_here, prompts, "evaluation", chosen.num_generations, chosen.temperature)
        rollouts = self._all_gather(own)
        rollouts = self._annotate(rollouts, self._unscored(rollouts, prompts) | self._estimates(model_here))
        if not rollouts[0].ref_logprobs or rollouts[0].old_logprobs:
            return rollouts
        # The engine rounds differently; in half precision its log-probs would add to the KL.
        policies = {"old_logprobs": None if model_here is None else policy_of(model_here)}
        return self._annotate(rollouts, {"rollout": partial(self._forward, policies=policies)})

    def pending(self) -> dict[str, dict[str, Any]]:
        """Prefetched rollouts by the number of their rollout batch, as tensors for a checkpoint's state."""
        if self._options.rollout.max_staleness == 0:
            return {}
        own = {} if self._async is None else {str(number): each for number, each in self._async.pending().items()}
        merged: dict[str, list[Rollout]] = {}
        for part in self._placement.all_gather_object(own):
            for number, rollouts in part.items():
                merged.setdefault(number, []).extend(rollouts)
        return {number: to_state(rollouts) for number, rollouts in merged.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Inverse of `pending`."""
        if self._async is None:
            return
        own = set(self._placement.local_indices("rollout", self._options.rl.prompts_per_rollout).tolist())
        restored = {int(number): from_state(state) for number, state in states.items()}
        self._async.restore(
            {number: [each for each in rollouts if each.prompt_index in own] for number, rollouts in restored.items()}
        )

    def fingerprints(self) -> dict[str, Any]:
        """Fingerprints of the frozen weights on all ranks, see `ReferenceModel.state`."""
        if self._fingerprint_cache is None:
            parts = self._placement.all_gather_object(self._roles.reference_model.state)
            references = (part["reference"] for part in parts if part["reference"] is not None)
            self._fingerprint_cache = {**parts[0], "reference": next(references, None)}
        return self._fingerprint_cache

    def close(self) -> None:
        """End the threads."""
        if self._async is not None:
            self._async.close()
        self._roles.event_loop.close()

    def _synced(self, model: nn.Module) -> nn.Module | None:
        """The policy with its critic, whole and with the current weights; None on a rank that does not generate."""
        if self._is_stale:
            self._placement.sync_weights(model if self._world.is_training else None, self._rollout_model)
            self._is_stale = False
        whole = model if self._rollout_model is None else self._rollout_model
        return whole if self._placement.has("rollout") else None

    def prompts(self, first: int) -> list[PromptExample]:
        """The prompts of a rollout batch: those from `first` on in the endless order of prompts."""
        size, shuffle = self._options.rl.prompts_per_rollout, self._options.data.shuffle
        indices = shuffled_indices(self._options.seed, len(self._rows.train), first, size, shuffle=shuffle)
        return [self._rows.train[index] for index in indices]

    def _sample_batch(self, policy: nn.Module, number: int) -> list[Rollout]:
        """This rank's rollouts of a rollout batch whose prompts follow from its number, as no group is filtered."""
        rl, prompts = self._options.rl, self.prompts(number * self._options.rl.prompts_per_rollout)
        return self._sample(policy, prompts, f"{self._options.seed}/{number}", rl.num_generations)

    def _sample(
        self,
        model: nn.Module | None,
        prompts: Sequence[PromptExample],
        key: str,
        num_generations: int,
        temperature: float | None = None,
    ) -> list[Rollout]:
        """This rank's rollouts, scored at once where the reward role is on the same ranks; `temperature` None:
        rollout.temperature."""
        own = [(int(index), prompts[index]) for index in self._placement.local_indices("rollout", len(prompts))]
        if model is None or not own:
            return []
        options, runner = self._options, self._roles.environment_runner
        # Rollouts of a thread run beside the steps, whose bar moves.
        is_shown = options.trainer.progress and self._world.rank == 0 and current_thread() is main_thread()
        bar = show_progress(f"completing {len(own)} prompts", enabled=is_shown)
        with torch.no_grad(), autocast(self._world.device, options.precision), bar:
            # A new engine each time: the KV cache of older weights is useless.
            engine = Engine(policy_of(model), options.rollout.engine_options, stop_ids=self._roles.eos_ids)
            run = partial(generate_rollouts, tokenizer=self._roles.tokenizer) if runner is None else runner.run
            sampling, known = options.rollout.sampling(temperature), self._roles.tokenizer.vocab_size
            if self._roles.compared is not None and known < engine.vocab_size:
                sampling = replace(sampling, suppress_tokens=tuple(range(known, engine.vocab_size)))
            most = None if runner is None else runner.options.max_episodes
            step = len(own) if most is None else most // num_generations
            waves = (own[start : start + step] for start in range(0, len(own), step))
            # Episodes and their environments are gone before the next ones begin.
            parts = (self._scored(run(engine, wave, sampling, num_generations, key), prompts) for wave in waves)
            return [each for part in parts for each in part]

    def _scored(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptExample]) -> list[Rollout]:
        """Rollouts with their rewards where that role is on the same ranks, without what only rewards read."""
        if self._placement.ranks["rollout"] == self._placement.ranks["reward"]:
            rewards = self._rewards(rollouts, prompts)
            rollouts = [replace(each, **own_fields) for each, own_fields in zip(rollouts, rewards, strict=True)]
        for each in rollouts:
            close_sessions(each.completion.columns.get("environments"))
        # Reward functions read the columns from the rows; ranks exchange numbers only.
        return [
            replace(each, completion=replace(each.completion, columns={}, prompt_messages=None)) for each in rollouts
        ]

    def _all_gather(self, own: Sequence[Rollout]) -> list[Rollout]:
        return [each for part in self._placement.all_gather_object(own) for each in part]

    def _annotate(self, rollouts: list[Rollout], annotators: Mapping[str, Annotator]) -> list[Rollout]:
        """Run each role's annotator on its ranks, each on its share of the rollouts, and all-gather the fields."""
        fields_of: dict[int, dict[str, Any]] = {}
        with torch.no_grad(), autocast(self._world.device, self._options.precision):
            for role, annotator in annotators.items():
                indices = self._placement.local_indices(role, len(rollouts)).tolist()
                annotations = annotator([rollouts[index] for index in indices])
                for index, annotation in zip(indices, annotations, strict=True):
                    fields_of.setdefault(index, {}).update(annotation)
        for part in self._placement.all_gather_object(fields_of):
            for index, annotation in part.items():
                rollouts[index] = replace(rollouts[index], **annotation)
        return rollouts

    def _unscored(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptExample]) -> dict[str, Annotator]:
        """The rewards, unless all rollouts have one already."""
        is_scored = all(each.score is not None for each in rollouts)
        return {} if is_scored else {"reward": partial(self._rewards, prompts=prompts)}

    def _rewards(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptExample]) -> Iterator[dict[str, Any]]:
        """The reward of each rollout, or of each of its tokens, unless an environment has given it."""
        if not self._roles.is_rewarded:
            yield from ({"score": 0.0} for _ in rollouts)
            return
        unscored = [each for each in rollouts if each.score is None]
        runner, scorer = self._roles.environment_runner, self._roles.scorer
        tools = {} if runner is None or runner.tools is None else {"tools": runner.tools}
        asked = ((each.completion, prompts[each.prompt_index]) for each in unscored)
        completions = [
            replace(
                completion,
                columns={**prompt.columns, **completion.columns},
                prompt_messages=completion.prompt_messages or prompt.messages,
                prompt_inputs={**prompt.inputs, **tools},
            )
            for completion, prompt in asked
        ]
        assert scorer is not None or not completions
        outputs = iter(scorer.checked_rewards(completions) if scorer is not None and completions else ())
        for each in rollouts:
            if each.score is not None:
                yield {}
                continue
            found = next(outputs)
            score = found.score
            if isinstance(score, list) and each.completion.loss_mask:
                # Only tokens of the policy get rewards, not those of observations.
                score = [one for one, is_own in zip(score, each.completion.loss_mask, strict=True) if is_own]
            yield {"score": tuple(score) if isinstance(score, list) else score, "rewards": found.rewards}

    def _estimates(self, model: nn.Module | None) -> dict[str, Annotator]:
        """The critic's values and, with rl.old_logprobs=recompute, the policy's old log-probs; the log-probs under the
        reference model, if there is one."""
        recomputes = model is not None and self._options.rl.old_logprobs == "recompute"
        policy = policy_of(model) if recomputes and model is not None else None
        critic = None if model is None else critic_of(model)
        references = {"ref_logprobs": self._roles.reference_model.model}
        return {
            "rollout": partial(self._forward, policies={"old_logprobs": policy}, critic=critic),
            "reference": partial(self._forward, policies=references),
        }

    def _forward(
        self,
        rollouts: Sequence[Rollout],
        policies: Mapping[str, nn.Module | None],
        critic: ValueHeadModel | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Token log-probs of each rollout under the policies that exist, by name, and the critic's values."""
        models = {name: each for name, each in policies.items() if each is not None}
        outputs: list[dict[str, Any]] = [{} for _ in rollouts]
        if not models and critic is None:
            yield from outputs
            return
        lengths = [len(each.completion.prompt) + len(each.completion.tokens) for each in rollouts]
        shares = critic is None and all(map(shares_prefixes, models.values()))
        prompts = prompt_bytes(each.completion.prompt for each in rollouts) if shares else None
        most = self._options.rl.max_tokens_per_microbatch
        for indices in forward_batches(lengths, most, self._world.device, prompts):
            batch = pad_rollouts([rollouts[index] for index in indices], self._rows.pad_id)
            tokens, targets = batch["tokens"], batch["targets"]
            mask = targets != IGNORED
            grids = {
                name: target_logprobs(model, tokens, targets, self._options.rollout.temperature)[0].cpu()
                for name, model in models.items()
            }
            if critic is not None:
                grids["values"] = token_values(critic, tokens, mask).cpu()
            for row, index in enumerate(indices):
                outputs[index] = {name: tuple(each[row][mask[row]].tolist()) for name, each in grids.items()}
        yield from outputs
