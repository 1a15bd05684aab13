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
from kitforge.data.sampler import shuffled_indices
from kitforge.data.tokenizer import Tokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.rlhf.actor_critic import critic_of, policy_of
from kitforge.kits.rlhf.ahead import Ahead
from kitforge.kits.rlhf.config import RLOptions, RolloutOptions
from kitforge.kits.rlhf.environment import Playground
from kitforge.kits.rlhf.fragments import Fragments
from kitforge.kits.rlhf.frozen import Frozen
from kitforge.kits.rlhf.judgement import select
from kitforge.kits.rlhf.order import at_once
from kitforge.kits.rlhf.rollouts import (
    Trajectory,
    answered,
    from_state,
    laid,
    to_state,
    token_log_probs,
    token_values,
)
from kitforge.kits.rlhf.rows import Rows
from kitforge.kits.rlhf.scoring import Scored, Scorer
from kitforge.kits.rlhf.weights import copied
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import Ending

# What one fragment says of answers: for each the fields that it knows.
Look: TypeAlias = Callable[[Sequence[Trajectory]], Iterator[dict[str, Any]]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who takes part besides what is trained; on a rank without a part in it, nobody."""

    scorer: Scorer | None  # None: the environment scores
    playground: Playground | None = None  # where answers of several turns are played
    frozen: Frozen  # the reference: the policy as it was; none where its distance costs nothing and is not measured
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer  # of all of them


@final
class Collector:
    """Each deed is one of all ranks: those that train ask for it, those beside them `attend`, and hear of it from rank
    0. Whoever has a part in it does that, and all have what comes of it."""

    def __init__(self, options: RLOptions, rows: Rows[PromptExample], roles: Roles, world: World) -> None:
        self._options = options
        self._rows = rows
        self._roles = roles
        self._world = world
        self._fragments = Fragments(options.placement, world)
        self._model: nn.Module | None = None  # that is trained here
        self._whole: nn.Module | None = None  # copies of it to draw with, where they must be
        self._has_moved = True
        self._known: dict[str, Any] | None = None
        staleness = options.rollout.max_staleness
        has_ahead = staleness > 0 and self._fragments.has("rollout")
        self._ahead = Ahead(staleness, self._draw, self._copied) if has_ahead else None
        self._deeds: dict[str, Callable[..., Any]] = {
            "round": self._round,
            "evaluation": self._evaluation,
            "drawn": self._drawn,
            "restore": self._restore,
            "fingerprints": self._fingerprints,
        }

    def prepare(self, build: Callable[[World], nn.Module], model: nn.Module | None) -> None:
        """Make the networks that are drawn with, where they are not those that are trained, the `model`. From now on
        those that stay as they are lie in memory in the run's precision."""
        if self._fragments.needs_copy:
            self._whole = build(World(device=self._world.device))
        moving = nn.ModuleList(each for each in (model, self._whole) if each is not None)
        self._roles.frozen.hold_in(self._options.precision, moving)

    def moved(self) -> None:
        """The weights may be others from now on, and have to be handed over before the next answer is drawn."""
        self._has_moved = True

    def round(self, model: nn.Module, number: int, first: int) -> list[Trajectory]:
        """The answers to the round's prompts, which begin at `first` in their endless order, with all that is known of
        them, the same on all ranks. Of answers that `select` leaves out nothing is known but their scores."""
        self._model = model
        found: list[Trajectory] = self._together("round", number, first, self._has_moved)
        return found

    def evaluation(self, model: nn.Module, num_prompts: int) -> list[Trajectory]:
        """The same for the answers, as `rl.eval` says, to each of the first evaluation prompts."""
        self._model = model
        found: list[Trajectory] = self._together("evaluation", num_prompts, self._has_moved)
        return found

    def drawn(self) -> dict[str, dict[str, Any]]:
        """The answers of rounds to come that are drawn ahead, by the number of their round, for a checkpoint's state.
        They are tensors there, as those of a round that is open."""
        found: dict[str, dict[str, Any]] = self._together("drawn") if self._options.rollout.max_staleness > 0 else {}
        return found

    def restore(self, rounds: Mapping[str, Any]) -> None:
        """Take back what `drawn` gave."""
        if self._options.rollout.max_staleness > 0:
            self._together("restore", dict(rounds))

    def fingerprints(self) -> dict[str, Any]:
        """What stays as it is while the run goes on, wherever it is; see `Frozen.state`."""
        if self._known is None:
            self._known = self._together("fingerprints")
        return self._known

    def close(self, ending: Ending) -> None:
        """Let the ranks go that attend."""
        if self._world.inference_ranks is not None and not self._world.is_inference_only:
            self._fragments.first(("end", ending))
        if self._ahead is not None:
            self._ahead.close()

    def attend(self) -> Ending:
        """Do what is asked for until the end, and say what came of it."""
        while True:
            deed, *words = self._fragments.first(None)
            if deed == "end":
                assert isinstance(words[0], Ending)
                self.close(words[0])
                return words[0]
            self._deeds[deed](*words)

    def _together(self, deed: str, *words: Any) -> Any:
        _, *words = self._fragments.first((deed, *words))
        return self._deeds[deed](*words)

    def _networks(self, is_new: bool) -> nn.Module | None:
        """Policy and critic as they are now, whole; None on a rank that draws nothing."""
        if is_new:
            self._fragments.hand_over(self._model, self._whole)
            self._has_moved = False
        if not self._fragments.has("rollout"):
            return None
        return self._model if self._whole is None else self._whole

    # The deeds.

    def _round(self, number: int, first: int, is_new: bool) -> list[Trajectory]:
        model, rl = self._networks(is_new), self._options.rl
        if not rl.drop_equal_groups:
            own: list[Trajectory] = []
            if model is not None:
                policy = policy_of(model)
                own = self._draw(policy, number) if self._ahead is None else self._ahead.take(policy, number)
            return self._examined(self._gathered(own), model, self._prompts(first))
        drawn: list[Trajectory] = []
        for batch in range(rl.max_num_gen_batches):
            drawn += self._scored_batch(model, number, first, batch)
            selection = select(drawn, self._options)
            if selection.is_full:
                break
        chosen = [drawn[place] for place in selection.places]
        for place, found in zip(selection.places, self._examined(chosen, model, None), strict=True):
            drawn[place] = found
        return drawn

    def _scored_batch(self, model: nn.Module | None, number: int, first: int, batch: int) -> list[Trajectory]:
        """Answers to that batch of the prompts that a round may need, scored and no more."""
        before = batch * self._options.rl.prompts_per_step
        prompts = self._prompts(first + before)
        name = f"{self._options.seed}/{number}" + (f"/{batch}" if batch else "")
        own: list[Trajectory] = []
        if model is not None:
            own = self._answers(policy_of(model), prompts, name, self._options.rl.samples_per_prompt)
        found = self._asked(self._gathered(own), {"reward": partial(self._scores, prompts=prompts)})
        return [replace(each, prompt_index=before + each.prompt_index) for each in found]

    def _evaluation(self, num_prompts: int, is_new: bool) -> list[Trajectory]:
        model, prompts = self._networks(is_new), self._rows.eval[:num_prompts]
        chosen, own = self._options.rl.eval, list[Trajectory]()
        if model is not None:
            policy, heat = policy_of(model), chosen.temperature
            own = self._answers(policy, prompts, "evaluation", chosen.num_generations, heat)
        found = self._examined(self._gathered(own), model, prompts)
        if not found[0].reference or found[0].old:
            return found
        # What the engine says is rounded in other places, which in half precision would count as a distance.
        again = None if model is None else policy_of(model)
        return self._asked(found, {"rollout": partial(self._looks, policies={"old": again}, valued=None)})

    def _drawn(self) -> dict[str, dict[str, Any]]:
        found = {} if self._ahead is None else self._ahead.drawn()
        merged: dict[str, list[Trajectory]] = {}
        for part in self._fragments.gather({str(number): answers for number, answers in found.items()}):
            for number, answers in part.items():
                merged.setdefault(number, []).extend(answers)
        return {number: to_state(answers) for number, answers in merged.items()}

    def _restore(self, rounds: Mapping[str, Any]) -> None:
        if self._ahead is None:
            return
        own = set(self._fragments.share("rollout", self._options.rl.prompts_per_step).tolist())
        read = {int(number): from_state(state) for number, state in rounds.items()}
        self._ahead.restore(
            {number: [each for each in answers if each.prompt_index in own] for number, answers in read.items()}
        )

    def _fingerprints(self) -> dict[str, Any]:
        parts = self._fragments.gather(self._roles.frozen.state)
        known = (part["reference"] for part in parts if part["reference"] is not None)
        return {**parts[0], "reference": next(known, None)}

    # What they consist of.

    def _prompts(self, first: int) -> list[PromptExample]:
        """The prompts of a round, from that place on in the endless order of prompts."""
        size, shuffle = self._options.rl.prompts_per_step, self._options.data.shuffle
        chosen = shuffled_indices(self._options.seed, len(self._rows.train), first, size, shuffle=shuffle)
        return [self._rows.train[index] for index in chosen]

    def _draw(self, policy: nn.Module, number: int) -> list[Trajectory]:
        """This rank's answers to the prompts of a round that drops none, so that it is known where they begin."""
        rl, name = self._options.rl, f"{self._options.seed}/{number}"
        return self._answers(policy, self._prompts(number * rl.prompts_per_step), name, rl.samples_per_prompt)

    def _answers(
        self,
        policy: nn.Module,
        prompts: Sequence[PromptExample],
        name: str,
        num_samples: int,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """This rank's answers, scored at once where the same ranks do that; at `rollout.temperature` unless told."""
        own = [(int(place), prompts[place]) for place in self._fragments.share("rollout", len(prompts))]
        if not own:
            return []
        options, playground = self._options, self._roles.playground
        with torch.no_grad(), autocast(self._world.device, options.precision):
            # Made anew each time: what an older policy has read is of no use.
            engine = Engine(policy, options.rollout.engine, stop_ids=self._roles.eos_ids)
            draw = partial(answered, tokenizer=self._roles.tokenizer) if playground is None else playground.played
            found = draw(engine, own, _drawn_at(options.rollout, temperature), num_samples, name)
            if self._fragments.are_together("rollout", "reward"):
                scores = list(self._scores(found, prompts))
                found = [replace(each, **score) for each, score in zip(found, scores, strict=True)]
        # Rewards read the columns from the rows; what is exchanged among ranks are numbers.
        return [replace(each, answer=replace(each.answer, columns={})) for each in found]

    def _gathered(self, own: Sequence[Trajectory]) -> list[Trajectory]:
        return [each for part in self._fragments.gather(own) for each in part]

    def _examined(
        self, answers: list[Trajectory], model: nn.Module | None, prompts: Sequence[PromptExample] | None
    ) -> list[Trajectory]:
        """The answers with what all networks say of them, and with their scores unless these are known (None)."""
        looks: dict[str, Look] = {
            "rollout": partial(self._trained_looks, model=model),
            "reference": self._reference_looks,
        }
        return self._asked(
            answers, looks if prompts is None else looks | {"reward": partial(self._scores, prompts=prompts)}
        )

    def _asked(self, everyone: list[Trajectory], looks: Mapping[str, Look]) -> list[Trajectory]:
        """The answers with what each fragment says of them, each rank of its share."""
        found: dict[int, dict[str, Any]] = {}
        with torch.no_grad(), autocast(self._world.device, self._options.precision):
            for fragment, look in looks.items():
                places = self._fragments.share(fragment, len(everyone)).tolist()
                said = look([everyone[place] for place in places])
                for place, numbers in zip(places, said, strict=True):
                    found.setdefault(place, {}).update(numbers)
        for part in self._fragments.gather(found):
            for place, numbers in part.items():
                everyone[place] = replace(everyone[place], **numbers)
        return everyone

    def _scores(self, found: Sequence[Trajectory], prompts: Sequence[PromptExample]) -> Iterator[dict[str, Any]]:
        """What each answer, or each of its tokens, scores, if nobody has said so yet."""
        open_ones = [each for each in found if each.score is None]
        asked = [replace(each.answer, columns=prompts[each.prompt_index].columns) for each in open_ones]
        assert self._roles.scorer is not None or not asked
        scored = iter(self._roles.scorer.all_scored(asked) if self._roles.scorer is not None and asked else ())
        for each in found:
            own = Scored(score=None, rewards=each.rewards) if each.score is not None else next(scored)
            score = each.score if own.score is None else own.score
            if isinstance(score, list) and each.answer.learnt:
                # Rewards are of what the policy wrote, and not of what it was told.
                score = [one for one, is_own in zip(score, each.answer.learnt, strict=True) if is_own]
            yield {"score": tuple(score) if isinstance(score, list) else score, "rewards": own.rewards}

    def _trained_looks(self, found: Sequence[Trajectory], model: nn.Module | None) -> Iterator[dict[str, Any]]:
        """The critic's values and, where asked for, the policy's own log-probabilities."""
        assert model is not None or not found
        again = None if model is None or self._options.rl.old != "trainer" else policy_of(model)
        return self._looks(found, {"old": again}, model)

    def _reference_looks(self, found: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
        return self._looks(found, {"reference": self._roles.frozen.reference}, None)

    def _looks(
        self, found: Sequence[Trajectory], policies: Mapping[str, nn.Module | None], valued: nn.Module | None
    ) -> Iterator[dict[str, Any]]:
        """What the networks that are there say of each answer, token by token."""
        critic = None if valued is None else critic_of(valued)
        asked = {name: each for name, each in policies.items() if each is not None}
        if not asked and critic is None:
            yield from ({} for _ in found)
            return
        lengths = [len(each.answer.prompt) + len(each.answer.tokens) for each in found]
        looked: list[dict[str, Any]] = [{} for _ in found]
        for places in at_once(lengths, self._options.rl.max_tokens_per_microbatch, self._world.device):
            batch = laid([found[place] for place in places], self._rows.pad_id)
            tokens, targets = batch["tokens"], batch["targets"]
            mask = targets != IGNORED
            grids = {
                name: token_log_probs(network, tokens, targets, self._options.rollout.temperature)[0].cpu()
                for name, network in asked.items()
            }
            if critic is not None:
                grids["values"] = token_values(critic, tokens, mask).cpu()
            for row, place in enumerate(places):
                looked[place] = {name: tuple(each[row][mask[row]].tolist()) for name, each in grids.items()}
        yield from looked

    def _copied(self, policy: nn.Module) -> nn.Module:
        return copied(policy, self._world.device, self._options.compile_level)


def _drawn_at(options: RolloutOptions, temperature: float | None) -> InferenceOptions:
    """How answers are drawn; at another temperature, which may be 0, they are not trained on."""
    if temperature is None:
        return options
    shared = {each.name: getattr(options, each.name) for each in fields(InferenceOptions)}
    return InferenceOptions(**shared | {"temperature": temperature})
