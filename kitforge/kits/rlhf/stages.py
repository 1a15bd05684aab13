"""What each stage needs before it can run: rows, networks and a task over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from kitforge.core.nn.decoder import Decoder
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import World
from kitforge.data.chat_datasets import ChatDatasetReader, ExampleKind, PreferencePair, TokenizedExample
from kitforge.data.example_cache import build_example_cache
from kitforge.data.template import template_of
from kitforge.data.token_cache import default_root
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.rlhf.actor_critic import ActorCritic, policy_of
from kitforge.kits.rlhf.collector import Roles
from kitforge.kits.rlhf.config import (
    AdapterOptions,
    DialogueOptions,
    KTOOptions,
    PreferenceOptions,
    RewardOptions,
    RLOptions,
    SFTOptions,
    StageOptions,
)
from kitforge.kits.rlhf.frozen import Frozen
from kitforge.kits.rlhf.kto import KTOTask
from kitforge.kits.rlhf.networks import (
    Origin,
    is_scalar,
    load_scalar,
    open_policy,
    open_scalar,
    origin_of,
    recorded_reference,
    sharding_of,
    stored_origin,
    tokenizer_beside,
    tokenizer_of,
)
from kitforge.kits.rlhf.preference import PreferenceTask
from kitforge.kits.rlhf.record import KeptRounds
from kitforge.kits.rlhf.reward import Normalisation, RewardTask
from kitforge.kits.rlhf.rl import RLTask
from kitforge.kits.rlhf.rows import Rows, read_rows
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.scoring import RewardModel, networks_in, scorer_of, several_of, weighed
from kitforge.kits.rlhf.sft import SFTTask
from kitforge.kits.rlhf.shown import ShownAnswers
from kitforge.kits.rlhf.tool_environment import playground_of, with_tools
from kitforge.kits.rlhf.weights import continued, copied
from kitforge.models.peft import is_adapter, read_head
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
    reader: ChatDatasetReader
    device: torch.device
    rank: int  # of this process
    is_evaluation: bool  # the model is looked at as it is, and not to be trained

    def rows(
        self,
        kind: ExampleKind | None,
        columns: str,
        reserved: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rows[Any]:
        """The rows of the stage, which have these columns; prompts, in which the chat template names the `tools`, where
        there is no other kind. Raises ConfigError where there are none."""
        purpose, name = ("evaluate", "eval") if self.is_evaluation else ("train", "train")
        if self.specs == (None, None):
            raise ConfigError(
                f"{self.options.task} has nothing to {purpose} on",
                got=f"data.{name}=null",
                expected=f"rows with the columns {columns}",
                fix=f"add data.{name}=FILE or pass {name}_dataset=; kitforge train recipe=rlhf_tiny needs no file",
            )
        return self.read(kind, self.specs, self.options.data, reserved, tools)

    def read(
        self,
        kind: ExampleKind | None,
        specs: tuple[object, object],
        data: DialogueOptions,
        reserved: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Rows[Any]:
        """Rows to train on and to evaluate on: from a cache of tokens, but for prompts."""

        def read(spec: object) -> Sequence[Any]:
            if kind is None:
                prompts = self.reader.prompts(spec)
                template = template_of(self.tokenizer)
                return list(prompts if tools is None else (with_tools(each, template, tools) for each in prompts))
            return build_example_cache(
                self.reader, self.tokenizer, kind, spec, default_root(), num_workers=data.num_workers
            )

        seed, pad_id = self.options.seed, self.tokenizer.pad_id
        return read_rows(read, specs, data, seed=seed, pad_id=pad_id, reserved=reserved)

    def origin(self, given: nn.Module | None, *, is_shared: bool = False) -> Origin:
        """What a language model is made from; `is_shared` where several are made from it at once."""
        return origin_of(self.options, given, self.tokenizer, self.device, is_shared=is_shared)

    def frozen(
        self,
        origin: Origin,
        reference: nn.Module | None = None,
        critics: ScalarModel | None = None,
        known: str | None = None,
        judge: object = None,
    ) -> Frozen:
        """What stays as it is beside what is trained; a critic's adapter begins beside the weights of a reward model,
        where it is a critic of one."""
        bases = (origin.given, None if critics is None else critics.backbone)
        own = [each for each in bases if each is not None] if self.options.adapter.is_on else ()
        given = networks_in([self.inputs.model, *self.inputs.roles.values()])
        return Frozen(reference, own, known, judges=networks_in(judge), given=given)

    def reference(self, named: str | None) -> Origin | None:
        """The language model in the role `reference`, or in the folder that is named: of a Run, in a folder, or in
        memory. Without one a run that is evaluated has the one that it was trained beside; None where there is none."""
        given = self.inputs.roles.get("reference", named)
        if isinstance(given, (Run, nn.Module)):
            return Origin(given=policy_of(given.model if isinstance(given, Run) else given), config=None)
        if given is not None:
            return stored_origin(self.options, self.tokenizer, partial(open_policy, Path(given)))
        return (
            recorded_reference(self.options, self.inputs, self.tokenizer, self.device) if self.is_evaluation else None
        )


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
    # Rows that are trained on are read in an evaluation only where some of them are kept for it.
    train = None if is_evaluation and evaluation is not None else train
    tokenizer = tokenizer_of(options, inputs.tokenizer, train)
    return Parts(
        options=options,
        inputs=inputs,
        specs=(train, evaluation),
        tokenizer=tokenizer,
        reader=ChatDatasetReader(tokenizer, template_of(tokenizer), options.data.columns, options.data.unusable),
        device=device,
        rank=rank,
        is_evaluation=is_evaluation,
    )


def sft(parts: Parts) -> Prepared:
    """Demonstrations, and the network itself."""
    options = cast(SFTOptions, parts.options)
    origin = parts.origin(parts.inputs.model)
    rows = parts.rows("demonstrations", "prompt and completion, or text")

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
    rows, stored, trained = _pairs(parts), _stored_scalar(parts), _trained_scalar(parts)
    origin = stored or parts.origin(parts.inputs.model if trained is None else trained.backbone)

    def build(world: World) -> nn.Module:
        if trained is not None and parts.is_evaluation:
            return trained
        if origin.is_by_pieces:
            return _ready(origin.scalar(options, world), options)
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
    has_reference, build = options.preference.needs_reference, _policy(parts, origin)
    compared = _reference(parts, options.reference, origin) if has_reference else None

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        return PreferenceTask(options, rows, build, world, _beside(parts, origin, compared, world)), ()

    return Prepared(task=task, fingerprint=rows.fingerprint, network=origin.described())


def kto(parts: Parts) -> Prepared:
    """Single answers with a verdict each, a policy that is a copy of the one given, and the one given beside it."""
    options = cast(KTOOptions, parts.options)
    rows = parts.rows("unpaired", "prompt, completion and label")
    origin = parts.origin(parts.inputs.model)
    compared, build = _reference(parts, options.reference, origin), _policy(parts, origin)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        return KTOTask(options, rows, build, world, _beside(parts, origin, compared, world)), ()

    return Prepared(task=task, fingerprint=rows.fingerprint, network=origin.described())


def _beside(parts: Parts, origin: Origin, compared: Origin | None, world: World) -> Frozen:
    """What stays as it is, the reference cut as what is trained is: all ranks of a replica pass the same rows."""
    if compared is None:
        return parts.frozen(origin)
    options = parts.options
    # An adapter that training begins with is of no other network than its own.
    plain = options if compared is origin else replace(options, adapter=AdapterOptions())
    network, known = compared.reference(plain, world)
    return parts.frozen(origin, network, known=known)


def reinforcement(parts: Parts) -> Prepared:
    """Prompts, a policy that is a copy of the one given, the one given as its reference, a critic that begins as the
    reward model where there is one, and what scores answers; of these what the rank has a part in."""
    options = cast(RLOptions, parts.options)
    playground = playground_of(parts.inputs.roles, options, parts.tokenizer)
    tools = None if playground is None else playground.tools
    rows = parts.rows(None, "prompt, and those that rewards read", options.rollout.max_new_tokens, tools)
    pretraining = _pretraining(parts)
    given, num_training = parts.inputs.model, options.parallel.world_size
    held = options.placement.held_by(parts.rank, num_training)
    is_built = parts.rank < num_training or "rollout" in held
    origin = cache(lambda: parts.origin(policy_of(given) if given is not None else None, is_shared=True))
    scores, has_critic = _rewards(parts), is_built and options.rl.has_critic
    pieces = _pieces(parts, scores) if is_built else None
    is_whole = "reward" in held or (has_critic and (pieces is None or "rollout" in held))
    judge = _judge(parts, scores, origin) if is_whole else None
    basis = _critic_basis(judge, parts.tokenizer) if has_critic else None
    is_named = options.reference is not None or "reference" in parts.inputs.roles
    is_compared = "reference" in held and (options.kl.needs_reference or is_named)
    reference = _whole_reference(parts, options.reference, origin) if is_compared else None

    def build(world: World) -> nn.Module:
        if pieces is not None and world.is_sharded:
            is_pair, first = options.rl.has_critic and not parts.is_evaluation, pieces[0]
            both = first.actor_critic(pieces[1], options, world) if is_pair else first.policy(options, world)
            return _ready(both, options)
        network = origin().given
        if parts.is_evaluation and network is not None and not world.is_sharded:
            return network
        policy = origin().twin(options, world.device)
        model = ActorCritic(policy, _critic(basis, origin(), options, world)) if options.rl.has_critic else policy
        return _placed(model, options, world)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        roles = Roles(
            scorer=scorer_of(judge, parts.tokenizer, options.rl.max_tokens_per_microbatch)
            if judge is not None and "reward" in held
            else None,
            frozen=parts.frozen(
                origin() if is_built and pieces is None else Origin(given=None, config=None),
                reference,
                basis,
                judge=judge if "reward" in held else None,
            ),
            eos_ids=parts.tokenizer.eos_ids,
            playground=playground,
            tokenizer=parts.tokenizer,
        )
        made = RLTask(options, rows, roles, build, world, pretraining)
        return made, [
            ShownAnswers(made, parts.tokenizer),
            KeptRounds(made, parts.tokenizer, options.rollout.kept_rounds, options.rl.updates_per_round),
        ]

    network = (origin() if pieces is None else pieces[0]).described() if is_built else None
    return Prepared(task=task, fingerprint=_together(rows, pretraining), network=network)


def _pieces(parts: Parts, scores: Any) -> tuple[Origin, Origin] | None:
    """What a policy and its critic are filled from piece by piece, where no rank is to hold them whole; None where they
    are in memory already, and for adapters, which stand on weights that are whole."""
    options = cast(RLOptions, parts.options)
    is_cut = max(options.parallel.shard, options.parallel.tensor) > 1
    if not is_cut or parts.inputs.model is not None or options.adapter.is_on or isinstance(scores, (Run, ScalarModel)):
        return None
    policy = parts.origin(None)
    folder = Path(scores).expanduser() if isinstance(scores, (str, Path)) else None
    if folder is None or not folder.is_dir():
        return policy, policy
    if is_adapter(folder):
        return None
    own = tokenizer_beside(folder)
    if own is not None and own.fingerprint != parts.tokenizer.fingerprint:
        return policy, policy
    return policy, stored_origin(options, parts.tokenizer, partial(open_scalar, folder))


def _whole_reference(parts: Parts, named: str | None, origin: Callable[[], Origin]) -> nn.Module | None:
    """What a policy is compared with, whole on this rank: its passes are over as many answers as each rank has."""
    options, compared = parts.options, parts.reference(named)
    if compared is not None:
        return _ready(compared.frozen(replace(options, adapter=AdapterOptions()), parts.device), options)
    return None if parts.is_evaluation else _ready(origin().frozen(options, parts.device), options)


def _together(rows: Rows[Any], pretraining: Rows[Any] | None) -> str:
    return rows.fingerprint if pretraining is None else f"{rows.fingerprint} beside {pretraining.fingerprint}"


def _pretraining(parts: Parts) -> Rows[TokenizedExample] | None:
    """Text that the policy must not forget; None where it counts for nothing."""
    options = cast(RLOptions, parts.options)
    source = parts.inputs.roles.get("ptx", options.ptx.data)
    check(source is None or options.ptx.weight > 0, "ptx.weight", options.ptx.weight, "above 0 beside the role ptx")
    if options.ptx.weight == 0 or parts.is_evaluation:
        return None
    check(source is not None, "ptx.data", None, 'rows for ptx.weight: a file, or roles={"ptx": ROWS}')
    return parts.read("demonstrations", (source, None), replace(options.data, eval_fraction=0.0))


def _reference(parts: Parts, named: str | None, origin: Origin) -> Origin:
    """What a policy is compared with: the one in that role, else the one that training begins with."""
    given = parts.reference(named)
    if given is None and parts.is_evaluation:
        raise ConfigError(
            f"{parts.options.task} is evaluated beside its reference",
            fix='add reference=FOLDER or pass roles={"reference": MODEL}, the policy that training began with',
        )
    return given or origin


def _policy(parts: Parts, origin: Origin) -> Callable[[World], nn.Module]:
    """What makes a copy of the policy that was given, to be trained."""

    def build(world: World) -> nn.Module:
        if parts.is_evaluation or origin.is_by_pieces:
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
            fix='pass roles={"reward": RUN or FUNCTION}, or add reward=RUN_FOLDER, reward=exact or '
            "reward=package.module:function",
        )
    return given


def _judge(parts: Parts, given: Any, origin: Callable[[], Origin]) -> Any:
    """What gives the rewards: a scalar model with its tokenizer, a function, a name, or several."""
    if several := several_of(given):
        weights = {name: weighed(name, each) for name, each in several.items()}
        return {name: (weight, _judge(parts, each, origin)) for name, (weight, each) in weights.items()}
    if not isinstance(given, (str, Path)) or not Path(given).expanduser().is_dir():
        return given
    folder = Path(given).expanduser()
    if is_adapter(folder):
        return origin().scorer(folder, parts.options)
    model = load_scalar(folder, parts.device, parts.options.compile_level)
    return RewardModel(model=model, tokenizer=tokenizer_beside(folder))


def _critic_basis(judge: Any, tokenizer: Tokenizer) -> ScalarModel | None:
    """The reward model that a critic begins as; None where there is none that reads the policy's tokens."""
    own = judge.tokenizer if isinstance(judge, (Run, RewardModel)) else None
    model = judge.model if isinstance(judge, (Run, RewardModel)) else judge
    reads_same = own is None or own.fingerprint == tokenizer.fingerprint
    return model if isinstance(model, ScalarModel) and reads_same else None


def _critic(basis: ScalarModel | None, origin: Origin, options: RLOptions, world: World) -> ScalarModel:
    """A scalar model that expects what answers will score."""
    if basis is not None:
        critic = ScalarModel(_judging(basis.backbone, options, world.device))
        critic.start_from(basis)
    else:
        critic = ScalarModel(origin.twin(options, world.device, "critic"))
        critic.reset_head(options.seed)
    return critic


def _judging(backbone: nn.Module, options: RLOptions, device: torch.device) -> nn.Module:
    """What a critic reads with, beginning as what the reward model reads with."""
    if options.adapter.is_on and isinstance(backbone, Decoder):
        return continued(backbone, "critic", options.adapter.config, options.seed, options.compile_level)
    return copied(backbone, device, options.compile_level)


def _pairs(parts: Parts) -> Rows[PreferencePair]:
    return parts.rows("pairs", "chosen and rejected, and prompt unless both begin with it")


def _stored_scalar(parts: Parts) -> Origin | None:
    """The reward model in files that is gone on with, or looked at, piece by piece; None where there is none, and for
    adapters, which stand on one that is whole."""
    folder = parts.options.checkpoint
    if parts.inputs.model is not None or folder is None or parts.options.adapter.is_on or not is_scalar(Path(folder)):
        return None
    return stored_origin(parts.options, parts.tokenizer, partial(open_scalar, Path(folder)))


def _trained_scalar(parts: Parts) -> ScalarModel | None:
    """The reward model in memory that is gone on with, or looked at; None where one begins from a language model."""
    given, folder = parts.inputs.model, parts.options.checkpoint
    if isinstance(given, ScalarModel):
        return given
    is_there = given is None and folder is not None and is_scalar(Path(folder))
    if is_there and folder is not None and parts.options.adapter.is_on:
        return load_scalar(Path(folder), parts.device, parts.options.compile_level)
    if parts.is_evaluation and not is_there:
        raise ModelError("there is no reward model to evaluate", fix="add checkpoint=RUN, or train one first")
    return None


def _placed(model: nn.Module, options: StageOptions, world: World) -> nn.Module:
    """The model ready for its trainer, and cut as the world's degrees say."""
    parallel_model_of(_ready(model, options), world, sharding_of(model))
    return model


def _ready(model: nn.Module, options: StageOptions) -> nn.Module:
    """The model as its trainer wants it: nothing kept within a block, or blocks compiled."""
    for decoder in (each for each in model.modules() if isinstance(each, Decoder)):
        decoder.recompute = options.trainer.recompute
        if options.compile_level == "O2":
            decoder.compile_blocks()
    return model
