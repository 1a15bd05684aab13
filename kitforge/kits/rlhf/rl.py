"""The task `ppo` and its relatives: a policy answers prompts, its answers are scored, and it moves towards better ones.

A round of rollouts gives `epochs * minibatches` steps of the one training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.apply import parallel_of
from kitforge.core.parallel.world import World
from kitforge.data.dialogues import Prompt, Response
from kitforge.data.packing import IGNORED
from kitforge.data.sampler import order
from kitforge.foundation import seed as seeds
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.inference.engine import Engine
from kitforge.kits.rlhf.actor_critic import critic_of, policy_of
from kitforge.kits.rlhf.ahead import Ahead
from kitforge.kits.rlhf.algorithms.aggregation import aggregate, only, share_of_denominator
from kitforge.kits.rlhf.algorithms.controllers import controller
from kitforge.kits.rlhf.algorithms.divergence import divergence, divergence_loss
from kitforge.kits.rlhf.algorithms.policy import policy_loss, value_loss
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.environment import Playground
from kitforge.kits.rlhf.frozen import Frozen
from kitforge.kits.rlhf.judgement import judged
from kitforge.kits.rlhf.order import Indices, Order, at_once
from kitforge.kits.rlhf.pretraining import Pretraining, is_pretraining, pretraining_count, pretraining_loss
from kitforge.kits.rlhf.rollouts import Round, Trajectory, answered, laid, token_log_probs, token_values
from kitforge.kits.rlhf.rows import Rows
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.scoring import Scorer
from kitforge.kits.rlhf.weights import copied, decoder_groups
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import Task

# Answers whose reference and values are found in one forward pass.
FORWARD_ROWS = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Who takes part besides what is trained."""

    build: Callable[[World], nn.Module]  # the policy, with a critic where there is one
    scorer: Scorer | None  # None: the environment scores
    playground: Playground | None = None  # where answers of several turns are played
    frozen: Frozen  # the reference: the policy as it was
    eos_ids: tuple[int, ...]
    pretraining: Rows[Response] | None = None  # text that the policy must not forget


@final
class RLTask(Task):
    """A micro-batch holds rows of a `Round`, see there, and `is_present` [B], False for one that stands in for none; or
    rows of pretraining."""

    def __init__(self, options: RLOptions, rows: Rows[Prompt], roles: Roles, world: World) -> None:
        self._options = options
        self._rows = rows
        self._roles = roles
        self._world = world
        self._order = Order(len(rows.train), options, world)
        self._pretraining = None if roles.pretraining is None else Pretraining(options, roles.pretraining, world)
        self._controller = controller(options.kl.controller)
        self._round: Round | None = None
        self._whole: nn.Module | None = None
        self._num_served = 0
        self.evaluated: list[Trajectory] = []  # the answers of the last evaluation
        staleness = options.rollout.max_staleness
        self._ahead = Ahead(staleness, self._draw, self._copied) if staleness else None
        # A round's answers by its number, where they are already known.
        self.recorded: Callable[[int], list[Trajectory]] | None = None
        self.collected: tuple[int, list[Trajectory]] | None = None  # the newest round's number, and its answers

    def build(self, world: World) -> nn.Module:
        """The policy, with a critic where there is one, on the device."""
        model = self._roles.build(world)
        # What answers, and looks at answers, where the trained networks lie in pieces.
        self._whole = self._roles.build(World(device=world.device)) if world.is_cut else None
        return model

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, heads, norms and biases do not."""
        return decoder_groups(model, weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Updates in that many passes over the prompts."""
        rounds = math.ceil(len(self._rows.train) * epochs / self._options.rl.prompts_per_step)
        return rounds * self._options.rl.updates_per_round

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Updates from the cursor on, with new answers for each round."""
        number, served = divmod(cursor.step, self._options.rl.updates_per_round)
        while True:
            if served == 0:
                self._round = self._collect(model, number)
            assert self._round is not None
            for within in range(served, self._options.rl.updates_per_round):
                self._num_served = within + 1
                yield self._micro_batches(self._round, number, within)
            number, served = number + 1, 0

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """What divides the loss, generated tokens and answers of this rank's part."""
        tokens, answers, weight = torch.zeros(()), torch.zeros(()), torch.zeros(())
        for micro_batch in (each for each in step if not is_pretraining(each)):
            mask = _counted(micro_batch)
            tokens, answers = tokens + mask.sum(), answers + micro_batch["is_present"].sum()
            weight = weight + self._share(mask)
        of_tokens = dict.fromkeys(("entropy", "clip_fraction", "approximate_kl", "value_loss", "tokens"), tokens)
        of_answers = dict.fromkeys((*self._figures(), "samples"), answers)
        return {"loss": weight, **of_tokens, **of_answers, **pretraining_count(step)}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the policy's losses, weighed as `rl.aggregation` says, and of the critic's."""
        if is_pretraining(micro_batch):
            return pretraining_loss(policy_of(model), micro_batch)
        options, mask = self._options, _counted(micro_batch)
        batch = {name: micro_batch[name] for name in ("tokens", "targets")}
        log_probs, entropies = token_log_probs(policy_of(model), **batch, temperature=options.rollout.temperature)
        mask = mask.to(log_probs.device)
        grids = [micro_batch[name].to(log_probs) for name in ("old", "reference", "advantages", "weights")]
        log_probs, entropies, old, reference, gains, weights = only(mask, log_probs, entropies, *grids)
        losses, is_clipped = policy_loss(log_probs, old, gains, options.rl.clip, weights)
        if options.kl.used_as == "loss":
            away = divergence_loss(log_probs, reference, options.kl.estimator, drawn_from=old)
            losses = losses + micro_batch["figures"]["coefficient"] * away
        losses = losses - options.rl.entropy_weight * entropies
        total = aggregate(losses, mask, options.rl.aggregation, 1.0)
        sums = {
            "policy_loss": total.detach(),
            "entropy": entropies.sum(),
            "clip_fraction": is_clipped.sum(),
            "approximate_kl": divergence(old, log_probs, "k3").sum(),
            **self._figure_sums(micro_batch),
        }
        if (critic := critic_of(model)) is not None:
            values, before, wanted = only(
                mask, token_values(critic, batch["tokens"], mask), *(micro_batch[name].to(log_probs) for name in CRITIC)
            )
            errors, _ = value_loss(values, before, wanted, options.rl.value_clip)
            sums["value_loss"] = errors.sum()
            critical = options.rl.value_weight * micro_batch["value_scale"] * sums["value_loss"]
            # While it warms up the policy's part has weight 0, and so gradients that are 0.
            total = critical + total * (0.0 if micro_batch["warms_up"] else 1.0)
        return {"loss": total, **sums}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/reward, eval/kl in nats an answer, eval/length and eval/ended over the evaluation prompts; eval/loss is
        minus the reward."""
        limit, size = self._options.trainer.evaluate_batches, self._options.rl.prompts_per_step
        prompts = self._rows.eval if limit is None else self._rows.eval[: limit * size]
        if not prompts:
            return {}
        model = self._gathered(model)
        share = self._share_of(np.arange(len(prompts), dtype=np.int64))
        found = self._answers(policy_of(model), [(int(index), prompts[index]) for index in share], "evaluation", 1)
        found = self._looked_at(found, model)
        everyone = self.evaluated = [each for part in self._world.agree_replicas(found) for each in part]
        figures = judged(everyone, single(self._options), 0.0, self._rows.pad_id).figures
        kept = {f"eval/{name}": figures[name] for name in ("reward", "kl", "length", "ended")}
        return kept | {"eval/loss": -figures["reward"]}

    def state(self) -> dict[str, Any]:
        """The prompts, the reference, what a nat costs, and the answers of a round that is not over."""
        is_open = self._round is not None and self._num_served < self._options.rl.updates_per_round
        return {
            "rows": self._rows.fingerprint,
            "num_rows": len(self._rows.train),
            **self._roles.frozen.state,
            "controller": self._controller.state(),
            "pretraining": None if self._pretraining is None else self._pretraining.fingerprint,
            "round": self._round.to_plain() if is_open and self._round is not None else None,
            "ahead": {} if self._ahead is None else self._all_drawn(self._ahead),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take it back; refuse to go on with other prompts or another reference or base than the run began with."""
        allowed = self._options.trainer.allow_changes
        self._rows.check_same(state["rows"], allowed)
        if self.recorded is None:
            self._roles.frozen.check_same(state, allowed)
        if self._pretraining is not None:
            self._pretraining.check_same(state["pretraining"], allowed)
        self._controller.load_state(state["controller"])
        self._round = None if state["round"] is None else Round.from_plain(state["round"])
        if self._ahead is not None:
            own = set(self._places().tolist())
            rounds = {int(number): map(Trajectory.from_plain, plain) for number, plain in state["ahead"].items()}
            self._ahead.restore(
                {number: [each for each in answers if each.prompt_index in own] for number, answers in rounds.items()}
            )

    @torch.no_grad()
    def _gathered(self, model: nn.Module) -> nn.Module:
        """The networks as they are now, whole on this rank."""
        if self._whole is None:
            return model
        parallel = parallel_of(model, self._world)
        for name, parameter in self._whole.named_parameters():
            # What is frozen is what it was on all ranks.
            if parameter.requires_grad:
                parameter.copy_(parallel.whole(name))
        return self._whole

    def _all_drawn(self, ahead: Ahead) -> dict[str, list[dict[str, Any]]]:
        """The answers of rounds to come, of all ranks, by the number of their round."""
        parts = self._world.agree_replicas(
            {str(number): [each.to_plain() for each in answers] for number, answers in ahead.drawn().items()}
        )
        return {number: [each for part in parts for each in part[number]] for number in parts[0]}

    def _copied(self, policy: nn.Module) -> nn.Module:
        return copied(policy, self._world.device, self._options.compile_level)

    def _collect(self, model: nn.Module, number: int) -> Round:
        """Answers to the round's prompts, judged, the same on all ranks."""
        everyone = self._drawn(model, number) if self.recorded is None else self.recorded(number)
        self.collected = (number, everyone)
        coefficient = self._controller.coefficient
        found = judged(everyone, self._options, coefficient, self._rows.pad_id)
        self._controller.update(found.figures["kl"], len(everyone))
        return replace(found, figures=found.figures | {"coefficient": coefficient})

    def _drawn(self, model: nn.Module, number: int) -> list[Trajectory]:
        """The answers of all ranks to the round's prompts."""
        model = self._gathered(model)
        policy = policy_of(model)
        own = self._draw(policy, number) if self._ahead is None else self._ahead.take(policy, number)
        return [each for part in self._world.agree_replicas(self._looked_at(own, model)) for each in part]

    def _draw(self, policy: nn.Module, number: int) -> list[Trajectory]:
        """This rank's answers to the round's prompts, with their scores."""
        rl, seed = self._options.rl, self._options.seed
        size = rl.prompts_per_step
        chosen = order(seed, len(self._rows.train), number * size, size, shuffle=self._options.data.shuffle)
        prompts = [(int(place), self._rows.train[chosen[place]]) for place in self._places()]
        return self._answers(policy, prompts, f"{seed}/{number}", rl.samples_per_prompt)

    def _places(self) -> Indices:
        """This rank's part of a round's prompts."""
        return self._share_of(np.arange(self._options.rl.prompts_per_step, dtype=np.int64))

    def _share_of(self, places: Indices) -> Indices:
        """This rank's part of the prompts."""
        return np.array_split(places, self._world.num_replicas)[self._world.replica]

    def _answers(
        self, policy: nn.Module, prompts: Sequence[tuple[int, Prompt]], name: str, num_samples: int
    ) -> list[Trajectory]:
        """Answers with their scores."""
        if not prompts:
            return []
        options, scorer, playground = self._options, self._roles.scorer, self._roles.playground
        with torch.no_grad(), autocast(self._world.device, options.precision):
            # Made anew each time: what an older policy has read is of no use.
            engine = Engine(policy, options.rollout.engine, stop_ids=self._roles.eos_ids)
            draw = answered if playground is None else playground.played
            found = draw(engine, prompts, options.rollout, num_samples, name)
            scores = (
                [each.score for each in found] if scorer is None else scorer.scores([each.answer for each in found])
            )
        return [
            replace(
                each,
                score=tuple(score) if isinstance(score, list) else score,
                # Rewards have seen the columns; what is exchanged among ranks are numbers.
                answer=replace(each.answer, columns={}),
            )
            for each, score in zip(found, scores, strict=True)
        ]

    def _looked_at(self, found: Sequence[Trajectory], model: nn.Module) -> list[Trajectory]:
        """The same with what the other networks say of each answer, token by token."""
        with torch.no_grad(), autocast(self._world.device, self._options.precision):
            looked = self._looks(found, policy_of(model), critic_of(model))
            return [replace(each, **extra) for each, extra in zip(found, looked, strict=True)]

    def _looks(
        self, found: Sequence[Trajectory], policy: nn.Module, critic: ScalarModel | None
    ) -> list[dict[str, Any]]:
        """The reference's log-probabilities, the critic's values and, where asked for, the trainer's own."""
        temperature = self._options.rollout.temperature
        again = policy if self._options.rl.old == "trainer" else None
        lengths = [len(each.answer.prompt) + len(each.answer.tokens) for each in found]
        looked: list[dict[str, Any]] = [{} for _ in found]
        for places in at_once(lengths, FORWARD_ROWS, self._world.device):
            batch = laid([found[place] for place in places], self._rows.pad_id)
            tokens, targets = batch["tokens"], batch["targets"]
            mask = targets != IGNORED
            grids = {
                name: token_log_probs(network, tokens, targets, temperature)[0].cpu()
                for name, network in (("reference", self._roles.frozen.reference), ("old", again))
                if network is not None
            }
            if critic is not None:
                grids["values"] = token_values(critic, tokens, mask).cpu()
            for row, place in enumerate(places):
                looked[place] = {name: tuple(each[row][mask[row]].tolist()) for name, each in grids.items()}
        return looked

    def _micro_batches(self, whole: Round, number: int, within: int) -> list[MicroBatch]:
        """One update's answers: a part of those of the round, in an order of their own for each pass."""
        rl = self._options.rl
        epoch, part = divmod(within, rl.minibatches)
        noise = seeds.generator(self._options.seed, "minibatch", number, epoch)
        size = len(whole.tokens) // rl.minibatches
        rows = torch.randperm(len(whole.tokens), generator=noise)[part * size : (part + 1) * size]
        mask = whole.mask[rows] & whole.is_kept[rows].unsqueeze(-1)
        # The loop divides by the policy's denominator; the critic's loss is a mean over tokens.
        denominator, warms_up = float(self._share(mask)), number < rl.critic_warmup
        scale = denominator / max(float(mask.sum()), 1.0)
        plain = {"figures": whole.figures, "value_scale": scale, "warms_up": warms_up}
        parts = self._order.fitted([_width(each) for each in whole.mask[rows]], rl.max_tokens_per_microbatch)
        answers: list[MicroBatch] = [{**_taken(whole, rows[place]), **plain} for place in parts]
        if self._pretraining is None:
            return answers
        # The same denominator again, so that what it weighs is the mean over its own tokens.
        weight = 0.0 if warms_up else self._options.ptx.weight * denominator
        return answers + self._pretraining.micro_batches(number * rl.updates_per_round + within, weight)

    def _share(self, mask: Tensor) -> Tensor:
        return share_of_denominator(mask, self._options.rl.aggregation, self._options.rollout.max_new_tokens)

    def _figures(self) -> list[str]:
        names = ["reward", "kl", "length", "ended", "coefficient"]
        return [*names, "explained_variance"] if self._options.rl.has_critic else names

    def _figure_sums(self, micro_batch: MicroBatch) -> Sums:
        """Means over the round as sums over this micro-batch's answers."""
        present = micro_batch["is_present"].sum()
        return {name: present * micro_batch["figures"][name] for name in self._figures()}


def single(options: RLOptions) -> RLOptions:
    """The options for answers that are looked at one by one."""
    rl = replace(
        options.rl, samples_per_prompt=1, minibatches=1, advantage="reinforce", drop_equal_groups=False, critic_warmup=0
    )
    return replace(options, rl=rl)


def _taken(whole: Round, rows: Tensor) -> dict[str, Tensor]:
    """Some answers, as wide as the longest of them; for a rank without any, one that counts for nothing."""
    chosen = rows if len(rows) else torch.zeros(1, dtype=torch.int64)
    width = _width(whole.mask[chosen].any(0))
    grids = {name: getattr(whole, name)[chosen, :width] for name in GRIDS}
    is_present = torch.ones(len(chosen), dtype=torch.bool) if len(rows) else torch.zeros(1, dtype=torch.bool)
    return {**grids, "is_kept": whole.is_kept[chosen] & is_present, "is_present": is_present}


def _width(mask: Tensor) -> int:
    """Tokens of a row, or of several on top of one another, by where it is True [T] that the next one is learnt."""
    return int(mask.nonzero().max()) + 2 if mask.any() else 1


def _counted(micro_batch: MicroBatch) -> Tensor:
    """True [B, T] at the tokens that count."""
    mask: Tensor = (micro_batch["targets"] != IGNORED) & micro_batch["is_kept"].unsqueeze(-1)
    return mask


# Grids of a round that a micro-batch takes rows of; those that the critic's loss reads.
GRIDS = ("tokens", "targets", "old", "reference", "values", "advantages", "returns", "weights")
CRITIC = ("values", "returns")
