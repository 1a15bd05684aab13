"""Collects rollouts: runs generation, rewards, reference and values, each on the ranks of its role."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from threading import current_thread, main_thread
from typing import Any, TypeAlias

import torch
from torch import nn

from kitforge.core.nn.shared_prefix import shares_prefixes
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PromptExample
from kitforge.data.schedule import shuffled_indices
from kitforge.data.text.packing import IGNORED
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.progress import show_progress
from kitforge.inference.engine import Engine
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.network_source import copy_model
from kitforge.kits.rlhf.batching import forward_batches
from kitforge.kits.rlhf.config import RLOptions, RolloutOptions
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.async_rollouts import AsyncRollouts
from kitforge.kits.rlhf.reinforcement.environment import EnvironmentRunner
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
from kitforge.kits.rlhf.roles.rewards import RewardOutput, Scorer
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, critic_of, policy_of
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import RunResult

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


class RolloutCollector:
    """Runs the roles on their ranks and exchanges what they compute.

    Every public method is a collective. Training ranks call it; inference-only ranks sit in `serve` and receive the
    command from rank 0. Each rank runs the roles placed on it; results are all-gathered.
    """

    def __init__(
        self,
        options: RLOptions,
        rows: DatasetSplits[PromptExample],
        roles: Roles,
        world: World,
        phases: Mapping[str, Callable[..., list[Rollout]]],
    ) -> None:
        """`phases`: the rollout phases of the task, run on all ranks with the rollout model first."""
        self._options = options
        self._rows = rows
        self._roles = roles
        self._world = world
        self._placement = RolePlacement(options.role_ranks, world)
        self._model: nn.Module | None = None  # trained on this rank
        self._rollout_model: nn.Module | None = None  # a whole copy, where the trained model is sharded or elsewhere
        self._is_stale = True
        self._fingerprint_cache: dict[str, Any] | None = None
        staleness = options.rollout.max_staleness
        copy = partial(copy_model, device=world.device, level=options.compile_level)
        is_async = staleness > 0 and self._placement.has("rollout")
        self._async = AsyncRollouts(staleness, self._generate_round, copy) if is_async else None
        self._phases = phases
        self._commands: dict[str, Callable[..., Any]] = {
            "collect": self._collect,
            "pending": self._gather_pending,
            "restore": self._restore,
            "fingerprints": self._gather_fingerprints,
        }

    def prepare(self, build: Callable[[World], nn.Module], model: nn.Module | None) -> None:
        """Build the rollout model unless it is the trained `model`; cast frozen models to the run's precision."""
        is_elsewhere = self._world.is_inference_only or self._world.is_sharded
        if is_elsewhere and self._placement.has("rollout"):
            self._rollout_model = build(World(device=self._world.device))
        built = nn.ModuleList(each for each in (model, self._rollout_model) if each is not None)
        self._roles.reference_model.hold_in(self._options.precision, built)

    def mark_stale(self) -> None:
        """The trained weights change: sync them before the next generation."""
        self._is_stale = True

    # Commands.

    def collect(self, phase: str, model: nn.Module, *arguments: Any) -> list[Rollout]:
        """Run a rollout phase of the task with the current weights. The rollouts are equal on all ranks."""
        self._model = model
        rollouts: list[Rollout] = self._broadcast_command("collect", phase, self._is_stale, *arguments)
        return rollouts

    def pending(self) -> dict[str, dict[str, Any]]:
        """Prefetched rollouts by the number of their rollout batch, as tensors for a checkpoint's state."""
        if self._options.rollout.max_staleness == 0:
            return {}
        states: dict[str, dict[str, Any]] = self._broadcast_command("pending")
        return states

    def restore(self, states: Mapping[str, Any]) -> None:
        """Inverse of `pending`."""
        if self._options.rollout.max_staleness > 0:
            self._broadcast_command("restore", dict(states))

    def fingerprints(self) -> dict[str, Any]:
        """Fingerprints of the frozen weights on all ranks, see `ReferenceModel.state`."""
        if self._fingerprint_cache is None:
            self._fingerprint_cache = self._broadcast_command("fingerprints")
        return self._fingerprint_cache

    def close(self, ending: RunResult) -> None:
        """Release the inference-only ranks, and end the event loop."""
        if self._world.inference_ranks is not None and not self._world.is_inference_only:
            self._placement.broadcast_object(("end", ending))
        if self._async is not None:
            self._async.close()
        self._roles.event_loop.close()

    def serve(self) -> RunResult:
        """Run commands until the run ends; returns its result."""
        while True:
            command, *arguments = self._placement.broadcast_object(None)
            if command == "end":
                assert isinstance(arguments[0], RunResult)
                self.close(arguments[0])
                return arguments[0]
            self._commands[command](*arguments)

    def _broadcast_command(self, command: str, *arguments: Any) -> Any:
        _, *arguments = self._placement.broadcast_object((command, *arguments))
        return self._commands[command](*arguments)

    def _collect(self, phase: str, is_stale: bool, *arguments: Any) -> list[Rollout]:
        """Sync the rollout model (policy and critic, whole; None without the rollout role) and run the phase."""
        if is_stale:
            self._placement.sync_weights(self._model, self._rollout_model)
            self._is_stale = False
        model = self._model if self._rollout_model is None else self._rollout_model
        return self._phases[phase](model if self._placement.has("rollout") else None, *arguments)

    def _gather_pending(self) -> dict[str, dict[str, Any]]:
        own = {} if self._async is None else {str(number): each for number, each in self._async.pending().items()}
        merged: dict[str, list[Rollout]] = {}
        for part in self._placement.all_gather_object(own):
            for number, rollouts in part.items():
                merged.setdefault(number, []).extend(rollouts)
        return {number: to_state(rollouts) for number, rollouts in merged.items()}

    def _restore(self, states: Mapping[str, Any]) -> None:
        if self._async is None:
            return
        own = set(self._placement.local_indices("rollout", self._options.rl.prompts_per_rollout).tolist())
        restored = {int(number): from_state(state) for number, state in states.items()}
        self._async.restore(
            {number: [each for each in rollouts if each.prompt_index in own] for number, rollouts in restored.items()}
        )

    def _gather_fingerprints(self) -> dict[str, Any]:
        parts = self._placement.all_gather_object(self._roles.reference_model.state)
        references = (part["reference"] for part in parts if part["reference"] is not None)
        return {**parts[0], "reference": next(references, None)}

    # Parts of a rollout phase.

    def prompts(self, first: int) -> list[PromptExample]:
        """The prompts of a rollout batch: those from `first` on in the endless order of prompts."""
        size, shuffle = self._options.rl.prompts_per_rollout, self._options.data.shuffle
        indices = shuffled_indices(self._options.seed, len(self._rows.train), first, size, shuffle=shuffle)
        return [self._rows.train[index] for index in indices]

    def generate_batch(self, model: nn.Module | None, number: int) -> list[Rollout]:
        """Rollouts of a rollout batch without group filtering, on all ranks; prefetched with rollout.max_staleness."""
        own: list[Rollout] = []
        if model is not None:
            policy = policy_of(model)
            own = self._generate_round(policy, number) if self._async is None else self._async.collect(policy, number)
        return self._all_gather(own)

    def generate(
        self,
        model: nn.Module | None,
        prompts: Sequence[PromptExample],
        key: str,
        num_generations: int,
        temperature: float | None = None,
    ) -> list[Rollout]:
        """`num_generations` rollouts for each prompt, on all ranks; `temperature` None: rollout.temperature."""
        own = [] if model is None else self._generate(policy_of(model), prompts, key, num_generations, temperature)
        return self._all_gather(own)

    def _generate_round(self, policy: nn.Module, number: int) -> list[Rollout]:
        """This rank's rollouts of a rollout batch whose prompts follow from its number, as no group is filtered."""
        rl, prompts = self._options.rl, self.prompts(number * self._options.rl.prompts_per_rollout)
        return self._generate(policy, prompts, f"{self._options.seed}/{number}", rl.num_generations)

    def _generate(
        self,
        policy: nn.Module,
        prompts: Sequence[PromptExample],
        key: str,
        num_generations: int,
        temperature: float | None = None,
    ) -> list[Rollout]:
        """This rank's rollouts, scored at once where the reward role is on the same ranks."""
        own = [(int(index), prompts[index]) for index in self._placement.local_indices("rollout", len(prompts))]
        if not own:
            return []
        options, runner = self._options, self._roles.environment_runner
        # Rollouts of a thread run beside the steps, whose bar moves.
        is_shown = options.trainer.progress and self._world.rank == 0 and current_thread() is main_thread()
        bar = show_progress(f"completing {len(own)} prompts", enabled=is_shown)
        with torch.no_grad(), autocast(self._world.device, options.precision), bar:
            # A new engine each time: the KV cache of older weights is useless.
            engine = Engine(policy, options.rollout.engine, stop_ids=self._roles.eos_ids)
            run = partial(generate_rollouts, tokenizer=self._roles.tokenizer) if runner is None else runner.run
            rollouts = run(engine, own, _sampling_options(options.rollout, temperature), num_generations, key)
            if self._placement.ranks["rollout"] == self._placement.ranks["reward"]:
                scores = list(self.score(rollouts, prompts))
                rollouts = [replace(each, **score) for each, score in zip(rollouts, scores, strict=True)]
        # Reward functions read the columns from the rows; ranks exchange numbers only.
        return [replace(each, completion=replace(each.completion, columns={})) for each in rollouts]

    def _all_gather(self, own: Sequence[Rollout]) -> list[Rollout]:
        return [each for part in self._placement.all_gather_object(own) for each in part]

    def annotate(self, rollouts: list[Rollout], annotators: Mapping[str, Annotator]) -> list[Rollout]:
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

    def score(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptExample]) -> Iterator[dict[str, Any]]:
        """The reward of each rollout, or of each of its tokens, unless it has one."""
        unscored = [each for each in rollouts if each.score is None]
        asked = [prompts[each.prompt_index] for each in unscored]
        runner = self._roles.environment_runner
        tools = {} if runner is None or runner.tools is None else {"tools": runner.tools}
        completions = [
            replace(
                each.completion,
                columns=prompt.columns,
                prompt_messages=prompt.messages,
                prompt_inputs={**prompt.inputs, **tools},
            )
            for each, prompt in zip(unscored, asked, strict=True)
        ]
        scorer = self._roles.scorer
        assert scorer is not None or not completions
        outputs = iter(scorer.checked_rewards(completions) if scorer is not None and completions else ())
        for each in rollouts:
            own = RewardOutput(score=None, rewards=each.rewards) if each.score is not None else next(outputs)
            score = each.score if own.score is None else own.score
            if isinstance(score, list) and each.completion.loss_mask:
                # Only tokens of the policy get rewards, not those of observations.
                score = [one for one, is_own in zip(score, each.completion.loss_mask, strict=True) if is_own]
            yield {"score": tuple(score) if isinstance(score, list) else score, "rewards": own.rewards}

    def policy_outputs(self, rollouts: Sequence[Rollout], model: nn.Module | None) -> Iterator[dict[str, Any]]:
        """The critic's values and, with rl.old_logprobs=recompute, the policy's old log-probs."""
        assert model is not None or not rollouts
        recomputes = model is not None and self._options.rl.old_logprobs == "recompute"
        policy = policy_of(model) if recomputes and model is not None else None
        return self.forward(rollouts, {"old_logprobs": policy}, None if model is None else critic_of(model))

    def reference_logprobs(self, rollouts: Sequence[Rollout]) -> Iterator[dict[str, Any]]:
        """Log-probs under the reference model, if there is one."""
        return self.forward(rollouts, {"ref_logprobs": self._roles.reference_model.model})

    def forward(
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


def _sampling_options(options: RolloutOptions, temperature: float | None) -> InferenceOptions:
    """The sampling options of a rollout. A given temperature may be 0, as those completions are not trained on."""
    if temperature is None:
        return options
    shared = {each.name: getattr(options, each.name) for each in fields(InferenceOptions)}
    return InferenceOptions(**shared | {"temperature": temperature})
