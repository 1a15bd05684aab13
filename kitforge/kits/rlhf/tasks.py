"""Task builders: datasets, models and the `Task` of each RLHF task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import ChatDatasetReader, ExampleKind, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.kit import RunInputs, datasets
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.network_source import NetworkSource, prepare_training
from kitforge.kits.rlhf.config import (
    ChatDatasetOptions,
    KTOOptions,
    PreferenceOptions,
    RewardOptions,
    RLOptions,
    SFTOptions,
    StageOptions,
)
from kitforge.kits.rlhf.dataset import DatasetSplits, read_examples, read_rows
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_collector import Roles
from kitforge.kits.rlhf.reinforcement.rollout_log import RolloutLog, SampleLogger
from kitforge.kits.rlhf.reinforcement.tool_environment import environment_runner_of, with_tools
from kitforge.kits.rlhf.role_ranks import ROLES
from kitforge.kits.rlhf.roles.model_copy import copy_model, copy_with_adapter
from kitforge.kits.rlhf.roles.model_loading import (
    actor_critic,
    adapted_reward_model,
    base_model_of,
    find_tokenizer_or_none,
    frozen_copy,
    is_reward_model,
    load_reward_model,
    open_policy,
    open_reward_model,
    recorded_reference_model,
    reference_of,
    sharding_of_role,
    stored_base_model,
    tokenizer_of,
    trainable_copy,
    value_head_model,
)
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel
from kitforge.kits.rlhf.roles.rewards import (
    RewardModel,
    critic_init,
    networks_in,
    reward_members,
    scorer_of,
    weighted_member,
)
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel, normalized_head, policy_of
from kitforge.kits.rlhf.supervised.dpo import PreferenceTask
from kitforge.kits.rlhf.supervised.kto import KTOTask
from kitforge.kits.rlhf.supervised.reward import NormalizeRewards, RewardTask
from kitforge.kits.rlhf.supervised.sft import SFTTask
from kitforge.models.catalog import config_of_network
from kitforge.models.peft import is_adapter, read_head
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import Task

Inputs: TypeAlias = RunInputs[Tokenizer]
OptionsT = TypeVar("OptionsT", bound=StageOptions)
PAIR_COLUMNS = "chosen and rejected, and prompt unless both begin with it"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs(Generic[OptionsT]):
    """Inputs of all tasks: options, rows, tokenizer, device."""

    options: OptionsT
    inputs: Inputs
    sources: tuple[object, object]  # training and evaluation data
    tokenizer: Tokenizer
    reader: ChatDatasetReader
    device: torch.device
    rank: int  # of this process
    is_evaluation: bool  # the model is evaluated, not trained

    def rows(
        self,
        kind: ExampleKind | None,
        columns: str,
        reserved: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> DatasetSplits[Any]:
        """The rows of the task; `columns` names their columns for the error. `kind` None: prompts, rendered with the
        schemas of `tools`. Raises ConfigError without data."""
        purpose, name = ("evaluate", "eval") if self.is_evaluation else ("train", "train")
        if all(each is None for each in self.sources):
            raise ConfigError(
                f"{self.options.task} has no data to {purpose} on",
                got=f"data.{name}=null",
                expected=f"rows with the columns {columns}",
                fix=f"add data.{name}=FILE or pass {name}_dataset=; kitforge train recipe=rlhf_tiny needs no file",
            )
        return self.read(kind, self.sources, self.options.data, reserved, tools)

    def read(
        self,
        kind: ExampleKind | None,
        specs: tuple[object, object],
        data: ChatDatasetOptions,
        reserved: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> DatasetSplits[Any]:
        """Training and evaluation rows; all but prompts are cached as tokens and may be a mixture."""
        seed, pad_id = self.options.seed, self.tokenizer.pad_id
        if kind is not None:
            return read_examples(self.reader, self.tokenizer, kind, specs, data, seed)

        def prompts(spec: object) -> Sequence[Any]:
            found, template = self.reader.prompts(spec), template_of(self.tokenizer)
            return list(found if tools is None else (with_tools(each, template, tools) for each in found))

        return read_rows(prompts, specs, data, seed=seed, pad_id=pad_id, reserved=reserved)

    def base_model(self, given: nn.Module | None, *, is_shared: bool = False) -> NetworkSource:
        """The source of a language model; `is_shared` if several models are made from it."""
        return base_model_of(self.options, given, self.tokenizer, self.device, is_shared=is_shared)

    def reference_model(
        self,
        base_model: NetworkSource,
        reference: nn.Module | None = None,
        critics: ValueHeadModel | None = None,
        known: str | None = None,
        reward_source: object = None,
    ) -> ReferenceModel:
        """The frozen models of the task. With LoRA these include the base models: that of the policy, and the backbone
        of the reward model that initializes the critic."""
        bases = (base_model.given, None if critics is None else critics.backbone)
        own = [each for each in bases if each is not None] if self.options.lora.is_on else ()
        given = networks_in([self.inputs.model, *self.inputs.roles.values()])
        return ReferenceModel(reference, own, known, judges=networks_in(reward_source), given=given)

    def reference_base(self, named: str | None) -> NetworkSource | None:
        """The reference model: the role `reference` (a Run, folder or module), else the folder `named`. An evaluation
        without either uses the reference that the run was trained with. None without a reference."""
        given, plain = self.inputs.roles.get("reference", named), replace(self.options, lora=LoraOptions())
        if isinstance(given, (Run, nn.Module)):
            # An initial adapter (lora.path) belongs to the policy's base model only.
            return NetworkSource(options=plain, given=policy_of(given.model if isinstance(given, Run) else given))
        if given is not None:
            return stored_base_model(plain, self.tokenizer, partial(open_policy, Path(given)))
        return (
            recorded_reference_model(self.options, self.inputs, self.tokenizer, self.device)
            if self.is_evaluation
            else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBuilder:
    """A task before the process group exists: the constructor of its `Task`, and its model config."""

    task: Callable[[World], tuple[Task, Sequence[Callback]]]  # the task and its callbacks
    fingerprint: str  # of the training rows
    network: dict[str, Any] | None  # model options for the checkpoint; None on a rank without the policy


def task_inputs_of(
    options: OptionsT, inputs: Inputs, device: torch.device, *, rank: int = 0, is_evaluation: bool = False
) -> TaskInputs[OptionsT]:
    """Load rows and tokenizer."""
    train, evaluation = datasets(options, inputs, is_evaluation=is_evaluation)
    tokenizer = tokenizer_of(options, inputs.processor, train)
    return TaskInputs(
        options=options,
        inputs=inputs,
        sources=(train, evaluation),
        tokenizer=tokenizer,
        reader=ChatDatasetReader(tokenizer, template_of(tokenizer), options.data.columns, options.data.on_invalid),
        device=device,
        rank=rank,
        is_evaluation=is_evaluation,
    )


def sft(parts: TaskInputs[SFTOptions]) -> TaskBuilder:
    """Supervised fine-tuning on demonstrations."""
    options = parts.options
    base_model = parts.base_model(parts.inputs.model)
    rows = parts.rows("demonstrations", "prompt and completion, or text")

    def build(world: World) -> nn.Module:
        if options.lora.is_on and not parts.is_evaluation:
            return _sharded(trainable_copy(base_model, world.device), options, world)
        return base_model.build(world)

    return TaskBuilder(
        task=lambda world: (SFTTask(options, rows, build, world, parts.reference_model(base_model)), ()),
        fingerprint=rows.fingerprint,
        network=base_model.recorded(),
    )


def reward(parts: TaskInputs[RewardOptions]) -> TaskBuilder:
    """Reward modelling on preference pairs: a value head on a copy of the policy."""
    options = parts.options
    rows = parts.rows("pairs", PAIR_COLUMNS)
    stored, trained = _stored_reward_model(parts), _loaded_reward_model(parts)
    base_model = stored or parts.base_model(parts.inputs.model if trained is None else trained.backbone)

    def build(world: World) -> nn.Module:
        if trained is not None and parts.is_evaluation:
            return _sharded(trained, options, world)
        if base_model.given is None:
            return value_head_model(base_model, world)
        model = ValueHeadModel(trainable_copy(base_model, world.device, "reward"))
        if trained is not None:
            model.load_head(trained.head())
        elif options.lora.path is not None and (head := read_head(Path(options.lora.path))):
            model.load_head(head)
        else:
            model.reset_head(options.seed)
        return _sharded(model, options, world)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        made = RewardTask(options, rows, build, world, parts.reference_model(base_model))
        return made, [NormalizeRewards(made)] if options.reward.normalize_rewards else []

    return TaskBuilder(task=task, fingerprint=rows.fingerprint, network=base_model.recorded())


def preference(parts: TaskInputs[PreferenceOptions]) -> TaskBuilder:
    """Preference optimisation on pairs: trains a copy of the policy; the default reference is the policy itself."""
    options = parts.options
    rows, base_model = parts.rows("pairs", PAIR_COLUMNS), parts.base_model(parts.inputs.model)
    has_reference, build = options.preference.needs_reference, _policy(parts, base_model)
    compared = _reference(parts, options.reference, base_model) if has_reference else None
    return TaskBuilder(
        task=lambda world: (
            PreferenceTask(options, rows, build, world, _reference_model(parts, base_model, compared, world)),
            (),
        ),
        fingerprint=rows.fingerprint,
        network=base_model.recorded(),
    )


def kto(parts: TaskInputs[KTOOptions]) -> TaskBuilder:
    """KTO on labelled completions: trains a copy of the policy; the default reference is the policy itself."""
    options = parts.options
    rows = parts.rows("unpaired", "prompt, completion and label")
    base_model = parts.base_model(parts.inputs.model)
    compared, build = _reference(parts, options.reference, base_model), _policy(parts, base_model)
    return TaskBuilder(
        task=lambda world: (
            KTOTask(options, rows, build, world, _reference_model(parts, base_model, compared, world)),
            (),
        ),
        fingerprint=rows.fingerprint,
        network=base_model.recorded(),
    )


def _reference_model(
    parts: TaskInputs[Any], base_model: NetworkSource, compared: NetworkSource | None, world: World
) -> ReferenceModel:
    """The frozen reference model, sharded like the policy: all ranks of a replica process the same rows."""
    if compared is None:
        return parts.reference_model(base_model)
    network, known = reference_of(compared, world)
    return parts.reference_model(base_model, network, known=known)


def policy_gradient(parts: TaskInputs[RLOptions]) -> TaskBuilder:
    """Policy gradient on prompts: the policy, its reference model, a critic for GAE, initialized from the reward model
    if there is one, and the rewards. Builds only the roles placed on this rank."""
    options = parts.options
    loop = EventLoop()
    environment_runner = environment_runner_of(parts.inputs.roles, options, parts.tokenizer, loop)
    tools = None if environment_runner is None else environment_runner.tools
    rows = parts.rows(None, "prompt, and those that rewards read", options.rollout.max_new_tokens, tools)
    pretraining = _ptx_rows(parts)
    given, num_training = parts.inputs.model, options.parallel.world_size
    own_roles = {name for name in ROLES if parts.rank in options.role_ranks.ranks(name, num_training)}
    is_built = parts.rank < num_training or "rollout" in own_roles
    base_model = cache(lambda: parts.base_model(policy_of(given) if given is not None else None, is_shared=True))
    scores, has_critic = _rewards(parts), is_built and options.rl.has_critic
    sources = _sharded_sources(parts, scores) if is_built else None
    is_whole = "reward" in own_roles or (has_critic and (sources is None or "rollout" in own_roles))
    reward_source = _reward_source(parts, scores, base_model) if is_whole else None
    critic_base = critic_init(reward_source, parts.tokenizer) if has_critic else None
    is_named = options.reference is not None or "reference" in parts.inputs.roles
    is_compared = "reference" in own_roles and (options.kl.needs_reference or is_named)
    reference = _full_reference(parts, options.reference, base_model) if is_compared else None

    def build(world: World) -> nn.Module:
        if sources is not None and world.is_sharded:
            is_pair, first = options.rl.has_critic and not parts.is_evaluation, sources[0]
            return actor_critic(first, sources[1], world) if is_pair else first.build(world)
        network = base_model().given
        if parts.is_evaluation and network is not None and not world.is_sharded:
            return _sharded(network, options, world)
        policy = trainable_copy(base_model(), world.device)
        model = (
            ActorCritic(policy, _critic(critic_base, base_model(), options, world)) if options.rl.has_critic else policy
        )
        return _sharded(model, options, world)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        roles = Roles(
            scorer=scorer_of(reward_source, parts.tokenizer, options.rl.max_tokens_per_microbatch, loop)
            if reward_source is not None and "reward" in own_roles
            else None,
            reference_model=parts.reference_model(
                base_model() if is_built and sources is None else NetworkSource(options=options),
                reference,
                critic_base,
                reward_source=reward_source if "reward" in own_roles else None,
            ),
            eos_ids=parts.tokenizer.eos_ids,
            environment_runner=environment_runner,
            event_loop=loop,
            tokenizer=parts.tokenizer,
        )
        made = PolicyGradientTask(options, rows, roles, build, world, pretraining)
        return made, [
            SampleLogger(made, parts.tokenizer),
            RolloutLog(made, parts.tokenizer, options.rollout.keep_rollout_files, options.rl.updates_per_rollout),
        ]

    network = (base_model() if sources is None else sources[0]).recorded() if is_built else None
    fingerprint = rows.fingerprint if pretraining is None else f"{rows.fingerprint} and {pretraining.fingerprint}"
    return TaskBuilder(task=task, fingerprint=fingerprint, network=network)


def _sharded_sources(parts: TaskInputs[RLOptions], scores: Any) -> tuple[NetworkSource, NetworkSource] | None:
    """The stored models from which policy and critic are loaded shard by shard. None without sharding, for models in
    memory, and with LoRA, whose base weights are loaded whole."""
    options = parts.options
    is_cut = max(options.parallel.shard, options.parallel.tensor) > 1
    if not is_cut or parts.inputs.model is not None or options.lora.is_on or isinstance(scores, (Run, ValueHeadModel)):
        return None
    policy = parts.base_model(None)
    folder = Path(scores).expanduser() if isinstance(scores, (str, Path)) else None
    if folder is None or not folder.is_dir():
        return policy, policy
    if is_adapter(folder):
        return None
    own = find_tokenizer_or_none(folder)
    if own is not None and own.fingerprint != parts.tokenizer.fingerprint:
        return policy, policy
    return policy, stored_base_model(options, parts.tokenizer, partial(open_reward_model, folder))


def _full_reference(
    parts: TaskInputs[Any], named: str | None, base_model: Callable[[], NetworkSource]
) -> nn.Module | None:
    """The reference model of RL, whole on this rank, as each rank has a different number of completions."""
    compared = parts.reference_base(named)
    if compared is None and parts.is_evaluation:
        return None
    return prepare_training(frozen_copy(compared or base_model(), parts.device), parts.options)


def _ptx_rows(parts: TaskInputs[RLOptions]) -> DatasetSplits[TokenizedExample] | None:
    """Pretraining rows (ptx); None for ptx.coef=0."""
    options = parts.options
    source = parts.inputs.roles.get("ptx", options.ptx.data)
    check(source is None or options.ptx.coef > 0, "ptx.coef", options.ptx.coef, "above 0 with the role ptx")
    if options.ptx.coef == 0 or parts.is_evaluation:
        return None
    check(source is not None, "ptx.data", None, 'rows for ptx.coef: a file, or roles={"ptx": ROWS}')
    found = parts.read("demonstrations", (source, None), replace(options.data, eval_fraction=0.0))
    check(found.mixture is None, "ptx.data", "a mixture of sources", "files or rows without weights")
    return found


def _reference(parts: TaskInputs[Any], named: str | None, base_model: NetworkSource) -> NetworkSource:
    """The reference model: the role `reference`, else the initial policy."""
    given = parts.reference_base(named)
    if given is None and parts.is_evaluation:
        raise ConfigError(
            f"the evaluation of {parts.options.task} needs its reference model",
            fix='add reference=FOLDER or pass roles={"reference": MODEL}, the initial policy of the training',
        )
    return given or base_model


def _policy(parts: TaskInputs[Any], base_model: NetworkSource) -> Callable[[World], nn.Module]:
    """The constructor of the trained copy of the policy."""

    def build(world: World) -> nn.Module:
        if parts.is_evaluation or base_model.given is None:
            return base_model.build(world)
        return _sharded(trainable_copy(base_model, world.device), parts.options, world)

    return build


def _rewards(parts: TaskInputs[RLOptions]) -> Any:
    """The role or option `reward`; None if an environment gives the rewards."""
    options = parts.options
    given = parts.inputs.roles.get("reward", options.reward)
    has_environment = "environment" in parts.inputs.roles
    if has_environment and given is None:
        return None
    if has_environment:
        raise ConfigError(
            "two roles compute rewards",
            got="the roles reward and environment",
            expected="one of them",
            fix="leave the role reward out: the environment's steps return the rewards",
        )
    if given is None:
        raise ConfigError(
            f"{options.task} has no reward",
            fix='pass roles={"reward": RUN or FUNCTION}, or add reward=RUN_FOLDER, reward=exact or '
            "reward=package.module:function",
        )
    return given


def _reward_source(parts: TaskInputs[Any], source: Any, base_model: Callable[[], NetworkSource]) -> Any:
    """The reward source: a reward model with its tokenizer, a function, a name, or several."""
    if several := reward_members(source):
        weights = {name: weighted_member(name, each) for name, each in several.items()}
        return {name: (weight, _reward_source(parts, each, base_model)) for name, (weight, each) in weights.items()}
    if not isinstance(source, (str, Path)) or not Path(source).expanduser().is_dir():
        return source
    folder = Path(source).expanduser()
    if is_adapter(folder):
        return adapted_reward_model(base_model(), folder)
    model = load_reward_model(folder, parts.device, parts.options.compile_level)
    return RewardModel(model=model, tokenizer=find_tokenizer_or_none(folder))


def _critic(
    critic_base: ValueHeadModel | None, base_model: NetworkSource, options: RLOptions, world: World
) -> ValueHeadModel:
    """The critic: a value head model."""
    if critic_base is not None:
        critic = ValueHeadModel(_critic_backbone(critic_base.backbone, options, world.device))
        critic.load_head(normalized_head(critic_base.head()))
    else:
        critic = ValueHeadModel(trainable_copy(base_model, world.device, "critic"))
        critic.reset_head(options.seed)
    return critic


def _critic_backbone(backbone: nn.Module, options: RLOptions, device: torch.device) -> nn.Module:
    """The backbone of the critic, initialized from the reward model."""
    if options.lora.is_on and config_of_network(backbone) is not None:
        return copy_with_adapter(backbone, "critic", options.lora.config, options.seed, options.compile_level)
    return copy_model(backbone, device, options.compile_level)


def _stored_reward_model(parts: TaskInputs[Any]) -> NetworkSource | None:
    """The stored reward model to train on or to evaluate, loaded shard by shard. None if there is none, and with LoRA,
    whose base weights are loaded whole."""
    folder = parts.options.checkpoint
    if (
        parts.inputs.model is not None
        or folder is None
        or parts.options.lora.is_on
        or not is_reward_model(Path(folder))
    ):
        return None
    return stored_base_model(parts.options, parts.tokenizer, partial(open_reward_model, Path(folder)))


def _loaded_reward_model(parts: TaskInputs[Any]) -> ValueHeadModel | None:
    """The reward model in memory to train on or to evaluate; None to start from a language model."""
    given, folder = parts.inputs.model, parts.options.checkpoint
    if isinstance(given, ValueHeadModel):
        return given
    is_there = given is None and folder is not None and is_reward_model(Path(folder))
    if is_there and folder is not None and parts.options.lora.is_on:
        return load_reward_model(Path(folder), parts.device, parts.options.compile_level)
    if parts.is_evaluation and not is_there:
        raise ModelError("there is no reward model to evaluate", fix="add checkpoint=RUN, or train one first")
    return None


def _sharded(model: nn.Module, options: StageOptions, world: World) -> nn.Module:
    """The model prepared for training and sharded over the world."""
    parallel_model_of(prepare_training(model, options), world, sharding_of_role(model))
    return model
