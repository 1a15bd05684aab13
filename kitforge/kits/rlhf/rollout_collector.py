"""How the answers of a round come about: drawn, scored and looked at, each by the ranks whose part it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.chat_datasets import PromptExample
from kitforge.data.packing import IGNORED
from kitforge.data.schedule import shuffled_indices
from kitforge.data.tokenizer import Tokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.rlhf.actor_critic import critic_of, policy_of
from kitforge.kits.rlhf.async_rollouts import AsyncRollouts
from kitforge.kits.rlhf.batching import forward_batches
from kitforge.kits.rlhf.config import RLOptions, RolloutOptions
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.environment import EnvironmentRunner
from kitforge.kits.rlhf.experience import select_groups
from kitforge.kits.rlhf.model_copy import copy_model
from kitforge.kits.rlhf.reference_model import ReferenceModel
from kitforge.kits.rlhf.rewards import RewardOutput, Scorer
from kitforge.kits.rlhf.role_placement import RolePlacement
from kitforge.kits.rlhf.rollout_batch import (
    Rollout,
    from_state,
    generate_rollouts,
    pad_rollouts,
    to_state,
    token_logprobs,
    token_values,
)
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import RunResult

# What one fragment says of answers: for each the fields that it knows.
Annotator: TypeAlias = Callable[[Sequence[Rollout]], Iterator[dict[str, Any]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who takes part besides what is trained; on a rank without a part in it, nobody."""

    scorer: Scorer | None  # None: the environment scores
    environment_runner: EnvironmentRunner | None = None  # where answers of several turns are played
    reference_model: (
        ReferenceModel  # the reference: the policy as it was; none where its distance costs nothing and is not measured
    )
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer  # of all of them


@final
class RolloutCollector:
    """Each deed is one of all ranks: those that train ask for it, those beside them `attend`, and hear of it from rank
    0. Whoever has a part in it does that, and all have what comes of it."""

    def __init__(self, options: RLOptions, rows: DatasetSplits[PromptExample], roles: Roles, world: World) -> None:
        self._options = options
        self._rows = rows
        self._roles = roles
        self._world = world
        self._placement = RolePlacement(options.role_ranks, world)
        self._model: nn.Module | None = None  # that is trained here
        self._rollout_model: nn.Module | None = None  # copies of it to draw with, where they must be
        self._is_stale = True
        self._fingerprint_cache: dict[str, Any] | None = None
        staleness = options.rollout.max_staleness
        has_ahead = staleness > 0 and self._placement.has("rollout")
        self._async = AsyncRollouts(staleness, self._generate_round, self._copy_policy) if has_ahead else None
        self._commands: dict[str, Callable[..., Any]] = {
            "round": self._collect_round,
            "evaluation": self._collect_evaluation,
            "drawn": self._gather_pending,
            "restore": self._restore,
            "fingerprints": self._fingerprints,
        }

    def prepare(self, build: Callable[[World], nn.Module], model: nn.Module | None) -> None:
        """Make the networks that are drawn with, where they are not those that are trained, the `model`. From now on
        those that stay as they are lie in memory in the run's precision."""
        if self._placement.needs_copy:
            self._rollout_model = build(World(device=self._world.device))
        moving = nn.ModuleList(each for each in (model, self._rollout_model) if each is not None)
        self._roles.reference_model.hold_in(self._options.precision, moving)

    def mark_stale(self) -> None:
        """The weights may be others from now on, and have to be handed over before the next answer is drawn."""
        self._is_stale = True

    def collect(self, model: nn.Module, number: int, first: int) -> list[Rollout]:
        """The answers to the round's prompts, which begin at `first` in their endless order, with all that is known of
        them, the same on all ranks. Of answers that `select` leaves out nothing is known but their scores."""
        self._model = model
        found: list[Rollout] = self._broadcast_command("round", number, first, self._is_stale)
        return found

    def collect_evaluation(self, model: nn.Module, num_prompts: int) -> list[Rollout]:
        """The same for the answers, as `rl.eval` says, to each of the first evaluation prompts."""
        self._model = model
        found: list[Rollout] = self._broadcast_command("evaluation", num_prompts, self._is_stale)
        return found

    def pending(self) -> dict[str, dict[str, Any]]:
        """The answers of rounds to come that are drawn ahead, by the number of their round, for a checkpoint's state.
        They are tensors there, as those of a round that is open."""
        found: dict[str, dict[str, Any]] = (
            self._broadcast_command("drawn") if self._options.rollout.max_staleness > 0 else {}
        )
        return found

    def restore(self, rounds: Mapping[str, Any]) -> None:
        """Take back what `drawn` gave."""
        if self._options.rollout.max_staleness > 0:
            self._broadcast_command("restore", dict(rounds))

    def fingerprints(self) -> dict[str, Any]:
        """What stays as it is while the run goes on, wherever it is; see `ReferenceModel.state`."""
        if self._fingerprint_cache is None:
            self._fingerprint_cache = self._broadcast_command("fingerprints")
        return self._fingerprint_cache

    def close(self, ending: RunResult) -> None:
        """Let the ranks go that attend."""
        if self._world.inference_ranks is not None and not self._world.is_inference_only:
            self._placement.broadcast_object(("end", ending))
        if self._async is not None:
            self._async.close()

    def serve(self) -> RunResult:
        """Do what is asked for until the end, and say what came of it."""
        while True:
            command, *words = self._placement.broadcast_object(None)
            if command == "end":
                assert isinstance(words[0], RunResult)
                self.close(words[0])
                return words[0]
            self._commands[command](*words)

    def _broadcast_command(self, command: str, *arguments: Any) -> Any:
        _, *arguments = self._placement.broadcast_object((command, *arguments))
        return self._commands[command](*arguments)

    def _synced_model(self, is_stale: bool) -> nn.Module | None:
        """Policy and critic as they are now, whole; None on a rank that draws nothing."""
        if is_stale:
            self._placement.sync_weights(self._model, self._rollout_model)
            self._is_stale = False
        if not self._placement.has("rollout"):
            return None
        return self._model if self._rollout_model is None else self._rollout_model

    # The deeds.

    def _collect_round(self, number: int, first: int, is_stale: bool) -> list[Rollout]:
        model, rl = self._synced_model(is_stale), self._options.rl
        if not rl.filter_zero_variance_groups:
            own: list[Rollout] = []
            if model is not None:
                policy = policy_of(model)
                own = (
                    self._generate_round(policy, number) if self._async is None else self._async.collect(policy, number)
                )
            return self._annotate(self._all_gather(own), model, self._prompts(first))
        drawn: list[Rollout] = []
        for batch in range(rl.max_num_gen_batches):
            drawn += self._collect_scored_batch(model, number, first, batch)
            selection = select_groups(drawn, self._options)
            if selection.is_full:
                break
        chosen = [drawn[index] for index in selection.indices]
        for index, found in zip(selection.indices, self._annotate(chosen, model, None), strict=True):
            drawn[index] = found
        return drawn

    def _collect_scored_batch(self, model: nn.Module | None, number: int, first: int, batch: int) -> list[Rollout]:
        """Answers to that batch of the prompts that a round may need, scored and no more."""
        before = batch * self._options.rl.prompts_per_rollout
        prompts = self._prompts(first + before)
        name = f"{self._options.seed}/{number}" + (f"/{batch}" if batch else "")
        own: list[Rollout] = []
        if model is not None:
            own = self._generate(policy_of(model), prompts, name, self._options.rl.num_generations)
        found = self._run_annotators(self._all_gather(own), {"reward": partial(self._score, prompts=prompts)})
        return [replace(each, prompt_index=before + each.prompt_index) for each in found]

    def _collect_evaluation(self, num_prompts: int, is_stale: bool) -> list[Rollout]:
        model, prompts = self._synced_model(is_stale), self._rows.eval[:num_prompts]
        chosen, own = self._options.rl.eval, list[Rollout]()
        if model is not None:
            policy, heat = policy_of(model), chosen.temperature
            own = self._generate(policy, prompts, "evaluation", chosen.num_generations, heat)
        found = self._annotate(self._all_gather(own), model, prompts)
        if not found[0].ref_logprobs or found[0].old_logprobs:
            return found
        # What the engine says is rounded in other places, which in half precision would count as a distance.
        again = None if model is None else policy_of(model)
        return self._run_annotators(
            found, {"rollout": partial(self._forward_logprobs, policies={"old_logprobs": again}, critic_source=None)}
        )

    def _gather_pending(self) -> dict[str, dict[str, Any]]:
        found = {} if self._async is None else self._async.pending()
        merged: dict[str, list[Rollout]] = {}
        for part in self._placement.all_gather_object({str(number): answers for number, answers in found.items()}):
            for number, answers in part.items():
                merged.setdefault(number, []).extend(answers)
        return {number: to_state(answers) for number, answers in merged.items()}

    def _restore(self, rounds: Mapping[str, Any]) -> None:
        if self._async is None:
            return
        own = set(self._placement.local_indices("rollout", self._options.rl.prompts_per_rollout).tolist())
        read = {int(number): from_state(state) for number, state in rounds.items()}
        self._async.restore(
            {number: [each for each in answers if each.prompt_index in own] for number, answers in read.items()}
        )

    def _fingerprints(self) -> dict[str, Any]:
        parts = self._placement.all_gather_object(self._roles.reference_model.state)
        known = (part["reference"] for part in parts if part["reference"] is not None)
        return {**parts[0], "reference": next(known, None)}

    # What they consist of.

    def _prompts(self, first: int) -> list[PromptExample]:
        """The prompts of a round, from that place on in the endless order of prompts."""
        size, shuffle = self._options.rl.prompts_per_rollout, self._options.data.shuffle
        chosen = shuffled_indices(self._options.seed, len(self._rows.train), first, size, shuffle=shuffle)
        return [self._rows.train[index] for index in chosen]

    def _generate_round(self, policy: nn.Module, number: int) -> list[Rollout]:
        """This rank's answers to the prompts of a round that drops none, so that it is known where they begin."""
        rl, name = self._options.rl, f"{self._options.seed}/{number}"
        return self._generate(policy, self._prompts(number * rl.prompts_per_rollout), name, rl.num_generations)

    def _generate(
        self,
        policy: nn.Module,
        prompts: Sequence[PromptExample],
        name: str,
        num_samples: int,
        temperature: float | None = None,
    ) -> list[Rollout]:
        """This rank's answers, scored at once where the same ranks do that; at `rollout.temperature` unless told."""
        own = [(int(index), prompts[index]) for index in self._placement.local_indices("rollout", len(prompts))]
        if not own:
            return []
        options, playground = self._options, self._roles.environment_runner
        with torch.no_grad(), autocast(self._world.device, options.precision):
            # Made anew each time: what an older policy has read is of no use.
            engine = Engine(policy, options.rollout.engine, stop_ids=self._roles.eos_ids)
            draw = partial(generate_rollouts, tokenizer=self._roles.tokenizer) if playground is None else playground.run
            found = draw(engine, own, _sampling_options(options.rollout, temperature), num_samples, name)
            if self._placement.are_colocated("rollout", "reward"):
                scores = list(self._score(found, prompts))
                found = [replace(each, **score) for each, score in zip(found, scores, strict=True)]
        # Rewards read the columns from the rows; what is exchanged among ranks are numbers.
        return [replace(each, completion=replace(each.completion, columns={})) for each in found]

    def _all_gather(self, own: Sequence[Rollout]) -> list[Rollout]:
        return [each for part in self._placement.all_gather_object(own) for each in part]

    def _annotate(
        self, rollouts: list[Rollout], model: nn.Module | None, prompts: Sequence[PromptExample] | None
    ) -> list[Rollout]:
        """The answers with what all networks say of them, and with their scores unless these are known (None)."""
        annotators: dict[str, Annotator] = {
            "rollout": partial(self._policy_annotations, model=model),
            "reference": self._reference_annotations,
        }
        return self._run_annotators(
            rollouts, annotators if prompts is None else annotators | {"reward": partial(self._score, prompts=prompts)}
        )

    def _run_annotators(self, rollouts: list[Rollout], annotators: Mapping[str, Annotator]) -> list[Rollout]:
        """The answers with what each fragment says of them, each rank of its share."""
        found: dict[int, dict[str, Any]] = {}
        with torch.no_grad(), autocast(self._world.device, self._options.precision):
            for fragment, annotator in annotators.items():
                indices = self._placement.local_indices(fragment, len(rollouts)).tolist()
                said = annotator([rollouts[index] for index in indices])
                for index, numbers in zip(indices, said, strict=True):
                    found.setdefault(index, {}).update(numbers)
        for part in self._placement.all_gather_object(found):
            for index, numbers in part.items():
                rollouts[index] = replace(rollouts[index], **numbers)
        return rollouts

    def _score(self, rollouts: Sequence[Rollout], prompts: Sequence[PromptExample]) -> Iterator[dict[str, Any]]:
        """What each answer, or each of its tokens, scores, if nobody has said so yet."""
        open_ones = [each for each in rollouts if each.score is None]
        asked = [replace(each.completion, columns=prompts[each.prompt_index].columns) for each in open_ones]
        assert self._roles.scorer is not None or not asked
        scored = iter(self._roles.scorer.checked_rewards(asked) if self._roles.scorer is not None and asked else ())
        for each in rollouts:
            own = RewardOutput(score=None, rewards=each.rewards) if each.score is not None else next(scored)
            score = each.score if own.score is None else own.score
            if isinstance(score, list) and each.completion.loss_mask:
                # Rewards are of what the policy wrote, and not of what it was told.
                score = [one for one, is_own in zip(score, each.completion.loss_mask, strict=True) if is_own]
            yield {"score": tuple(score) if isinstance(score, list) else score, "rewards": own.rewards}

    def _policy_annotations(self, rollouts: Sequence[Rollout], model: nn.Module | None) -> Iterator[dict[str, Any]]:
        """The critic's values and, where asked for, the policy's own log-probabilities."""
        assert model is not None or not rollouts
        again = None if model is None or self._options.rl.old_logprobs != "recompute" else policy_of(model)
        return self._forward_logprobs(rollouts, {"old_logprobs": again}, model)

    def _reference_annotations(self, rollouts: Sequence[Rollout]) -> Iterator[dict[str, Any]]:
        return self._forward_logprobs(rollouts, {"ref_logprobs": self._roles.reference_model.model}, None)

    def _forward_logprobs(
        self, rollouts: Sequence[Rollout], policies: Mapping[str, nn.Module | None], critic_source: nn.Module | None
    ) -> Iterator[dict[str, Any]]:
        """What the networks that are there say of each answer, token by token."""
        critic = None if critic_source is None else critic_of(critic_source)
        asked = {name: each for name, each in policies.items() if each is not None}
        if not asked and critic is None:
            yield from ({} for _ in rollouts)
            return
        lengths = [len(each.completion.prompt) + len(each.completion.tokens) for each in rollouts]
        looked: list[dict[str, Any]] = [{} for _ in rollouts]
        for indices in forward_batches(lengths, self._options.rl.max_tokens_per_microbatch, self._world.device):
            batch = pad_rollouts([rollouts[index] for index in indices], self._rows.pad_id)
            tokens, targets = batch["tokens"], batch["targets"]
            mask = targets != IGNORED
            grids = {
                name: token_logprobs(network, tokens, targets, self._options.rollout.temperature)[0].cpu()
                for name, network in asked.items()
            }
            if critic is not None:
                grids["values"] = token_values(critic, tokens, mask).cpu()
            for row, index in enumerate(indices):
                looked[index] = {name: tuple(each[row][mask[row]].tolist()) for name, each in grids.items()}
        yield from looked

    def _copy_policy(self, policy: nn.Module) -> nn.Module:
        return copy_model(policy, self._world.device, self._options.compile_level)


def _sampling_options(options: RolloutOptions, temperature: float | None) -> InferenceOptions:
    """How answers are drawn; at another temperature, which may be 0, they are not trained on."""
    if temperature is None:
        return options
    shared = {each.name: getattr(options, each.name) for each in fields(InferenceOptions)}
    return InferenceOptions(**shared | {"temperature": temperature})
