"""What each stage needs before it can run: rows, networks and a task over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from kitforge.core.nn.decoder import Decoder
from kitforge.core.parallel.apply import parallel_of
from kitforge.core.parallel.world import World
from kitforge.data.dialogues import DialogueReader, Pair, Response
from kitforge.data.template import template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.rlhf.actor_critic import ActorCritic, policy_of
from kitforge.kits.rlhf.collector import Roles
from kitforge.kits.rlhf.config import KTOOptions, PreferenceOptions, RewardOptions, RLOptions, SFTOptions, StageOptions
from kitforge.kits.rlhf.environment import Playground
from kitforge.kits.rlhf.frozen import Frozen
from kitforge.kits.rlhf.kto import KTOTask
from kitforge.kits.rlhf.networks import (
    Origin,
    is_scalar,
    load_policy,
    load_scalar,
    origin_of,
    sharding_of,
    tokenizer_of,
)
from kitforge.kits.rlhf.preference import PreferenceTask
from kitforge.kits.rlhf.record import KeptRounds
from kitforge.kits.rlhf.reward import Normalisation, RewardTask
from kitforge.kits.rlhf.rl import RLTask
from kitforge.kits.rlhf.rows import Row, Rows, read_rows
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.scoring import scorer_of
from kitforge.kits.rlhf.sft import SFTTask
from kitforge.kits.rlhf.shown import ShownAnswers
from kitforge.kits.rlhf.weights import continued, copied
from kitforge.models.adapters import is_adapter, read_head
from kitforge.trainer.assembly import RunInputs
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run import Run
from kitforge.trainer.task import Task

Inputs: TypeAlias = RunInputs[Tokenizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all stages begin with."""

    options: StageOptions
    inputs: Inputs
    specs: tuple[object, object]  # of the training and the evaluation rows
    tokenizer: Tokenizer
    reader: DialogueReader
    device: torch.device
    rank: int  # of this process
    is_evaluation: bool  # the model is looked at as it is, and not to be trained

    def rows(self, read: Callable[[object], Iterable[Row]], length: Callable[[Row], int], columns: str) -> Rows[Row]:
        """The rows of the stage, which have these columns. Raises ConfigError where there are none."""
        purpose, name = ("evaluate", "eval") if self.is_evaluation else ("train", "train")
        if self.specs == (None, None):
            raise ConfigError(
                f"{self.options.task} has nothing to {purpose} on",
                got=f"data.{name}=null",
                expected=f"rows with the columns {columns}",
                fix=f"add data.{name}=FILE or pass {name}_dataset=; kitforge train recipe=rlhf_tiny needs no file",
            )
        options = self.options
        return read_rows(read, length, self.specs, options.data, seed=options.seed, pad_id=self.tokenizer.pad_id)

    def origin(self, given: nn.Module | None) -> Origin:
        """What a language model is made from."""
        return origin_of(self.options, given, self.tokenizer, self.device)

    def frozen(self, origin: Origin, reference: nn.Module | None = None, critics: Any = None) -> Frozen:
        """What stays as it is beside what is trained; a critic's adapter begins beside the weights of a reward model,
        where it is a critic of one."""
        bases = (origin.given, critics.backbone if isinstance(critics, ScalarModel) else None)
        return Frozen(reference, [each for each in bases if each is not None] if self.options.adapter.is_on else ())

    def role(self, name: str) -> nn.Module | None:
        """The language model in a role, if there is one: of a Run, in a folder, or in memory."""
        given = self.inputs.roles.get(name)
        if given is None or isinstance(given, (Run, nn.Module)):
            return given.model if isinstance(given, Run) else given
        return load_policy(Path(given), self.device, self.options.compile_level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A stage ready for its ranks to meet."""

    task: Callable[[World], tuple[Task, Sequence[Callback]]]  # and what watches over it
    fingerprint: str  # of the training rows
    network: dict[str, Any] | None  # what a checkpoint records of it; None where this rank does not know it


def parts_of(
    options: StageOptions, inputs: Inputs, device: torch.device, *, rank: int = 0, is_evaluation: bool = False
) -> Parts:
    """Find rows and tokenizer."""
    train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
    evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
    tokenizer = tokenizer_of(options, inputs.tokenizer, train)
    return Parts(
        options=options,
        inputs=inputs,
        specs=(train, evaluation),
        tokenizer=tokenizer,
        reader=DialogueReader(tokenizer, template_of(tokenizer), options.data.columns, options.data.unusable),
        device=device,
        rank=rank,
        is_evaluation=is_evaluation,
    )


def sft(parts: Parts) -> Prepared:
    """Demonstrations, and the network itself."""
    options = cast(SFTOptions, parts.options)
    origin = parts.origin(parts.inputs.model)
    rows = parts.rows(parts.reader.demonstrations, lambda row: len(row.tokens), "prompt and completion, or text")

    def build(world: World) -> nn.Module:
        if options.adapter.is_on and not parts.is_evaluation:
            return _placed(origin.twin(options, world.device), options, world)
        return _ready(origin.policy(options, world), options)

    return Prepared(
        task=lambda world: (SFTTask(options, rows, build, world, parts.frozen(origin)), ()),
        fingerprint=rows.fingerprint,
        network=origin.described(),
    )


def reward(parts: Parts) -> Prepared:
    """Pairs, and a scalar model over a copy of the policy that was given."""
    options = cast(RewardOptions, parts.options)
    rows, trained = _pairs(parts), _trained_scalar(parts)
    origin = parts.origin(parts.inputs.model if trained is None else trained.backbone)

    def build(world: World) -> nn.Module:
        if trained is not None and parts.is_evaluation:
            return trained
        model = ScalarModel(origin.twin(options, world.device, "reward"))
        if trained is not None:
            model.take_head(trained)
        elif options.adapter.path is not None and (head := read_head(Path(options.adapter.path))):
            model.load_head(head)
        else:
            model.reset_head(options.seed)
        return _placed(model, options, world)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        made = RewardTask(options, rows, build, world, parts.frozen(origin))
        return made, [Normalisation(made)] if options.reward.normalise else []

    return Prepared(task=task, fingerprint=rows.fingerprint, network=origin.described())


def preference(parts: Parts) -> Prepared:
    """Pairs, a policy that is a copy of the one given, and the one given as its reference."""
    options = cast(PreferenceOptions, parts.options)
    rows, origin = _pairs(parts), parts.origin(parts.inputs.model)
    reference = _reference(parts, origin) if options.preference.needs_reference else None
    frozen, build = parts.frozen(origin, reference), _policy(parts, origin)
    return Prepared(
        task=lambda world: (PreferenceTask(options, rows, build, world, frozen), ()),
        fingerprint=rows.fingerprint,
        network=origin.described(),
    )


def kto(parts: Parts) -> Prepared:
    """Single answers with a verdict each, a policy that is a copy of the one given, and the one given beside it."""
    options = cast(KTOOptions, parts.options)
    rows = parts.rows(parts.reader.judged, lambda row: len(row.response.tokens), "prompt, completion and label")
    origin = parts.origin(parts.inputs.model)
    frozen, build = parts.frozen(origin, _reference(parts, origin)), _policy(parts, origin)
    return Prepared(
        task=lambda world: (KTOTask(options, rows, build, world, frozen), ()),
        fingerprint=rows.fingerprint,
        network=origin.described(),
    )


def reinforcement(parts: Parts) -> Prepared:
    """Prompts, a policy that is a copy of the one given, the one given as its reference, a critic that begins as the
    reward model where there is one, and what scores answers; of these what the rank has a part in."""
    options = cast(RLOptions, parts.options)
    rows = parts.rows(
        parts.reader.prompts,
        lambda row: len(row.tokens) + options.rollout.max_new_tokens,
        "prompt, and those that rewards read",
    )
    pretraining = _pretraining(parts)
    given, num_training = parts.inputs.model, options.parallel.world
    held = options.placement.held_by(parts.rank, num_training)
    is_built = parts.rank < num_training or "rollout" in held
    origin = cache(lambda: parts.origin(policy_of(given) if given is not None else None))
    scores, has_critic = _rewards(parts), is_built and options.rl.has_critic
    judge = _judge(parts, scores, origin) if has_critic or "reward" in held else None
    is_compared = "reference" in held and (options.kl.needs_reference or "reference" in parts.inputs.roles)
    reference = (parts.role("reference") or origin().frozen(options, parts.device)) if is_compared else None

    def build(world: World) -> nn.Module:
        network = origin().given
        if parts.is_evaluation and network is not None and not world.is_cut:
            return network
        policy = origin().twin(options, world.device)
        model = ActorCritic(policy, _critic(judge, origin(), options, world)) if options.rl.has_critic else policy
        return _placed(model, options, world)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        roles = Roles(
            scorer=scorer_of(judge, parts.tokenizer) if judge is not None and "reward" in held else None,
            frozen=parts.frozen(origin(), reference, judge if has_critic else None) if is_built else Frozen(reference),
            eos_ids=parts.tokenizer.eos_ids,
            playground=_playground(parts),
        )
        made = RLTask(options, rows, roles, build, world, pretraining)
        return made, [
            ShownAnswers(made, parts.tokenizer),
            KeptRounds(made, parts.tokenizer, options.rollout.kept_rounds),
        ]

    network = origin().described() if is_built else None
    return Prepared(task=task, fingerprint=_together(rows, pretraining), network=network)


def _together(rows: Rows[Any], pretraining: Rows[Any] | None) -> str:
    return rows.fingerprint if pretraining is None else f"{rows.fingerprint} beside {pretraining.fingerprint}"


def _pretraining(parts: Parts) -> Rows[Response] | None:
    """Text that the policy must not forget; None where it counts for nothing."""
    options = cast(RLOptions, parts.options)
    source = parts.inputs.roles.get("ptx", options.ptx.data)
    check(source is None or options.ptx.weight > 0, "ptx.weight", options.ptx.weight, "above 0 beside the role ptx")
    if options.ptx.weight == 0 or parts.is_evaluation:
        return None
    check(source is not None, "ptx.data", None, 'rows for ptx.weight: a file, or roles={"ptx": ROWS}')
    return read_rows(
        parts.reader.demonstrations,
        lambda row: len(row.tokens),
        (source, None),
        replace(options.data, validation=0.0),
        seed=options.seed,
        pad_id=parts.tokenizer.pad_id,
    )


def _reference(parts: Parts, origin: Origin) -> nn.Module:
    """What a policy is compared with: the one in that role, else the one that training begins with."""
    given = parts.role("reference")
    if given is None and parts.is_evaluation:
        raise ConfigError(
            f"{parts.options.task} is evaluated beside its reference",
            fix='pass roles={"reference": MODEL}, the policy that training began with',
        )
    return given or origin.frozen(parts.options, parts.device)


def _policy(parts: Parts, origin: Origin) -> Callable[[World], nn.Module]:
    """What makes a copy of the policy that was given, to be trained."""

    def build(world: World) -> nn.Module:
        if parts.is_evaluation or origin.given is None:
            return _ready(origin.policy(parts.options, world), parts.options)
        return _placed(origin.twin(parts.options, world.device), parts.options, world)

    return build


def _rewards(parts: Parts) -> Any:
    """What the role `reward` was given, or the option of that name; None where an environment gives the rewards."""
    options = cast(RLOptions, parts.options)
    given = parts.inputs.roles.get("reward", options.reward)
    has_environment = "environment" in parts.inputs.roles
    if has_environment and given is None:
        return None
    if has_environment:
        raise ConfigError(
            "answers are scored twice",
            got="the roles reward and environment",
            fix="let the environment give the rewards",
        )
    if given is None:
        raise ConfigError(
            f"{options.task} has nothing that scores answers",
            fix='pass roles={"reward": RUN or FUNCTION}, or add reward=RUN_FOLDER, reward=exact or reward=gsm8k',
        )
    return given


def _judge(parts: Parts, given: Any, origin: Callable[[], Origin]) -> Any:
    """What gives the rewards: a scalar model, a function, a name, or several."""
    if isinstance(given, Run):
        return given.model
    if not isinstance(given, (str, Path)) or not Path(given).is_dir():
        return given
    if is_adapter(Path(given)):
        return origin().scorer(Path(given), parts.options)
    return load_scalar(Path(given), parts.device, parts.options.compile_level)


def _playground(parts: Parts) -> Playground | None:
    """Where answers of several turns are played; None without an environment."""
    options = cast(RLOptions, parts.options)
    make = parts.inputs.roles.get("environment")
    if make is None:
        return None
    check(callable(make), "the role environment", make, "a class, or a function that gives an Environment")
    check(options.placement.reward is None, "placement.reward", options.placement.reward, "none: it gives the rewards")
    for name in ("missing_end_penalty", "overlong_soft"):
        check(not getattr(options.rl, name), f"rl.{name}", getattr(options.rl, name), "0, as the environment judges")
    return Playground(
        make=make,
        tokenizer=parts.tokenizer,
        most_turns=options.rollout.max_turns,
        most_tokens=options.data.sequence_length,
    )


def _critic(judge: Any, origin: Origin, options: RLOptions, world: World) -> ScalarModel:
    """A scalar model that expects what answers will score."""
    if isinstance(judge, ScalarModel):
        critic = ScalarModel(_judging(judge.backbone, options, world.device))
        critic.start_from(judge)
    else:
        critic = ScalarModel(origin.twin(options, world.device, "critic"))
        critic.reset_head(options.seed)
    return critic


def _judging(backbone: nn.Module, options: RLOptions, device: torch.device) -> nn.Module:
    """What a critic reads with, beginning as what the reward model reads with."""
    if options.adapter.is_on and isinstance(backbone, Decoder):
        return continued(backbone, "critic", options.adapter.config, options.seed, options.compile_level)
    return copied(backbone, device, options.compile_level)


def _pairs(parts: Parts) -> Rows[Pair]:
    return parts.rows(
        parts.reader.pairs,
        lambda pair: max(len(pair.chosen.tokens), len(pair.rejected.tokens)),
        "chosen and rejected, and prompt unless both begin with it",
    )


def _trained_scalar(parts: Parts) -> ScalarModel | None:
    """The reward model that is gone on with, or looked at; None where one begins from a language model."""
    given, folder = parts.inputs.model, parts.options.checkpoint
    if isinstance(given, ScalarModel):
        return given
    if given is None and folder is not None and is_scalar(Path(folder)):
        return load_scalar(Path(folder), parts.device, parts.options.compile_level)
    if parts.is_evaluation:
        raise ModelError("there is no reward model to evaluate", fix="add checkpoint=RUN, or train one first")
    return None


def _placed(model: nn.Module, options: StageOptions, world: World) -> nn.Module:
    """The model ready for its trainer, and cut as the world's degrees say."""
    parallel_of(_ready(model, options), world, sharding_of(model))
    return model


def _ready(model: nn.Module, options: StageOptions) -> nn.Module:
    """The model as its trainer wants it: nothing kept within a block, or blocks compiled."""
    for decoder in (each for each in model.modules() if isinstance(each, Decoder)):
        decoder.recompute = options.trainer.recompute
        if options.compile_level == "O2":
            decoder.compile_blocks()
    return model
