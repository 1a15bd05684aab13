"""Task builders: datasets, models and the `Task` of each RLHF task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import ChatDatasetReader, ExampleKind, PromptExample, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import user_path
from kitforge.kits.kit import RunInputs, datasets
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.network_source import HeadSource, NetworkSource, Part, build_model, prepare_training
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
from kitforge.kits.rlhf.on_policy_config import DistillOptions, OnlineDPOOptions
from kitforge.kits.rlhf.reinforcement.distill import DistillTask
from kitforge.kits.rlhf.reinforcement.environment import EnvironmentRunner
from kitforge.kits.rlhf.reinforcement.environment_classes import environment_runner_of
from kitforge.kits.rlhf.reinforcement.online_dpo import OnlineDPOTask
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask, RolloutTask
from kitforge.kits.rlhf.reinforcement.rollout_collector import Roles
from kitforge.kits.rlhf.reinforcement.rollout_log import RolloutLog, SampleLogger
from kitforge.kits.rlhf.reinforcement.teacher import TEACHER_PROMPT, with_teacher_prompts
from kitforge.kits.rlhf.reinforcement.tool_environment import with_tools
from kitforge.kits.rlhf.role_ranks import ROLES
from kitforge.kits.rlhf.roles.code_reward import runner_of
from kitforge.kits.rlhf.roles.model_loading import (
    adapted_reward_model,
    find_tokenizer_or_none,
    is_reward_model,
    load_reward_model,
    open_policy,
    open_reward_model,
    policy_source,
    recorded_frozen_model,
    source_fingerprint,
    tokenizer_of,
    value_head,
)
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel
from kitforge.kits.rlhf.roles.rewards import (
    RewardModel,
    critic_init,
    has_reward,
    networks_in,
    reward_folders,
    reward_members,
    scorer_of,
    weighted_member,
)
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel, policy_of
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
            rows = list(found if tools is None else (with_tools(each, template, tools) for each in found))
            if not isinstance(self.options, DistillOptions):
                return rows
            own = {**self.reader.columns, "prompt": self.reader.columns.get(TEACHER_PROMPT, TEACHER_PROMPT)}
            return with_teacher_prompts(rows, lambda: self.reader.with_columns(own).prompts(spec), template)

        return read_rows(prompts, specs, data, seed=seed, pad_id=pad_id, reserved=reserved)

    def base_model(
        self, given: nn.Module | None, *, name: str = "policy", is_copied: bool = True, is_held: bool = False
    ) -> NetworkSource:
        """The source of a language model, which is trained as it is if it is not copied, or if it is evaluated. With
        adapters, and with `is_held`, it is whole in memory."""
        lora, is_trained = self.options.lora, not self.is_evaluation
        if is_trained and name == "policy" and lora.path is not None and read_head(Path(lora.path)):
            expected = "an adapter of a language model"
            raise ModelError("the adapter is of a reward model", got=lora.path, expected=expected)
        found = policy_source(self.options, given, self.tokenizer, lora)
        if given is not None or lora.is_on or is_held:
            found = found.held(self.device)
        adapter = lora if is_trained else LoraOptions()
        return replace(found, adapter=adapter, adapter_name=name, is_shared=is_trained and is_copied)

    def reference_model(
        self,
        bases: Sequence[NetworkSource],
        reference: nn.Module | None = None,
        known: str | None = None,
        reward_source: object = None,
    ) -> ReferenceModel:
        """The frozen models of the task. With LoRA these include the models that adapters are trained on."""
        own = [each.given for each in bases if each.given is not None] if self.options.lora.is_on else ()
        given = networks_in([self.inputs.model, *self.inputs.roles.values()])
        return ReferenceModel(reference, own, known, judges=networks_in(reward_source), given=given)

    def frozen_base(self, role: str, named: str | None) -> NetworkSource | None:
        """The model of the role `reference` or `teacher` (a Run, folder or module), else of the folder `named`. An
        evaluation without either uses the one that the run was trained with. None without one."""
        given = self.inputs.roles.get(role, named)
        if isinstance(given, (Run, nn.Module)):
            network = policy_of(given.model if isinstance(given, Run) else given)
            return NetworkSource(options=self.options, given=network)
        if given is not None:
            return (
                NetworkSource(options=self.options).stored_as(partial(open_policy, Path(given))).fitted(self.tokenizer)
            )
        if not self.is_evaluation:
            return None
        return recorded_frozen_model(self.options, self.inputs, self.tokenizer, self.device, role)


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
    base_model = parts.base_model(parts.inputs.model, is_copied=options.lora.is_on)
    rows = parts.rows("demonstrations", "prompt and completion, or text")
    return TaskBuilder(
        task=lambda world: (SFTTask(options, rows, base_model.build, world, parts.reference_model([base_model])), ()),
        fingerprint=rows.fingerprint,
        network=base_model.recorded(),
    )


def reward(parts: TaskInputs[RewardOptions]) -> TaskBuilder:
    """Reward modelling on preference pairs: a value head on a copy of the policy."""
    options, given, folder = parts.options, parts.inputs.model, parts.options.checkpoint
    rows, head = parts.rows("pairs", PAIR_COLUMNS), value_head(None, options.seed)
    is_stored = given is None and folder is not None and is_reward_model(Path(folder))
    if is_stored and folder is not None and options.lora.is_on:
        given = load_reward_model(Path(folder), parts.device, options.compile_level)
    if is_stored and folder is not None and given is None:
        source = NetworkSource(options=options).stored_as(partial(open_reward_model, Path(folder)))
        source = source.fitted(parts.tokenizer)
    elif isinstance(given, ValueHeadModel):
        trained, source = given, parts.base_model(given.backbone, name="reward")
        head = value_head(trained.head(), options.seed)
        if parts.is_evaluation:
            source = replace(source, given=trained.backbone)
            head = HeadSource(wrap=lambda _backbone: trained, tensors=lambda _model, _stored: {})
    elif parts.is_evaluation:
        raise ModelError("there is no reward model to evaluate", fix="add checkpoint=RUN, or train one first")
    else:
        source = parts.base_model(given, name="reward")
        head = value_head(read_head(Path(options.lora.path)) if options.lora.path else None, options.seed)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        build = partial(source.build, head=head)
        made = RewardTask(options, rows, build, world, parts.reference_model([source]))
        return made, [NormalizeRewards(made)] if options.reward.normalize_rewards else []

    return TaskBuilder(task=task, fingerprint=rows.fingerprint, network=source.recorded())


def preference(parts: TaskInputs[PreferenceOptions]) -> TaskBuilder:
    """Preference optimisation on pairs: trains a copy of the policy; the default reference is the policy itself."""
    rows = parts.rows("pairs", PAIR_COLUMNS)
    return _compared(parts, PreferenceTask, rows, has_reference=parts.options.preference.needs_reference)


def kto(parts: TaskInputs[KTOOptions]) -> TaskBuilder:
    """KTO on labelled completions: trains a copy of the policy; the default reference is the policy itself."""
    return _compared(parts, KTOTask, parts.rows("unpaired", "prompt, completion and label"), has_reference=True)


def _compared(parts: TaskInputs[Any], kind: Any, rows: DatasetSplits[Any], *, has_reference: bool) -> TaskBuilder:
    """A task that compares the policy with a reference, which is sharded like it: all ranks of a replica process the
    same rows."""
    options, base_model = parts.options, parts.base_model(parts.inputs.model)
    compared = parts.frozen_base("reference", options.reference) if has_reference else None
    if has_reference and compared is None and parts.is_evaluation:
        raise ConfigError(
            f"the evaluation of {options.task} needs its reference model",
            fix='add reference=FOLDER or pass roles={"reference": MODEL}, the initial policy of the training',
        )
    compared = compared or (base_model if has_reference else None)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        known = source_fingerprint(compared, world) if compared is not None and compared.given is None else None
        reference = None if compared is None else compared.frozen(world)
        return kind(options, rows, base_model.build, world, parts.reference_model([base_model], reference, known)), ()

    return TaskBuilder(task=task, fingerprint=rows.fingerprint, network=base_model.recorded())


def policy_gradient(
    parts: TaskInputs[Any],
    kind: Callable[..., RolloutTask] = PolicyGradientTask,
    compared: Callable[[World], ReferenceModel] | None = None,
) -> TaskBuilder:
    """Policy gradient on prompts: the policy, its reference model, a critic for GAE, initialized from the reward model
    if there is one, and the rewards. Builds only the roles placed on this rank. `kind` may be a task with another loss,
    that `compared` is the frozen model of."""
    options = parts.options
    loop = EventLoop()
    environment_runner = environment_runner_of(parts.inputs.roles, options, parts.tokenizer, loop)
    tools = None if environment_runner is None else environment_runner.tools
    rows = parts.rows(None, "prompt, and those that rewards read", options.rollout.max_new_tokens, tools)
    pretraining = _ptx_rows(parts)
    given, num_training = parts.inputs.model, options.parallel.world_size
    own_roles = {name for name in ROLES if parts.rank in options.role_ranks.ranks(name, num_training)}
    is_built, scores = parts.rank < num_training or "rollout" in own_roles, _rewards(parts, environment_runner)
    given, is_stored = None if given is None else policy_of(given), options.checkpoint is not None
    # A model of two networks has both in memory, or none.
    is_held = options.rl.has_critic and isinstance(scores, (Run, ValueHeadModel))
    is_held = is_held or (is_stored and any(map(is_adapter, reward_folders(scores))))
    base_model = cache(lambda: parts.base_model(given, is_held=is_held))
    reward_source = cache(lambda: _reward_source(parts, scores, base_model))
    has_critic = is_built and options.rl.has_critic and not parts.is_evaluation
    critic = _critic(parts, scores, reward_source, base_model) if has_critic else None
    judge = reward_source() if "reward" in own_roles else None
    if has_reward(judge, "python_tests"):
        runner_of(options.python_tests).check_solutions([each.columns for each in (*rows.train, *rows.eval)])
    is_named = options.reference is not None or "reference" in parts.inputs.roles
    is_named = is_named and not isinstance(options, OnlineDPOOptions)
    is_compared = "reference" in own_roles and (options.kl.needs_reference or is_named)
    reference = _full_reference(parts, base_model) if is_compared else None

    def build(world: World) -> nn.Module:
        # Sharded in place, a given policy could not also generate on this rank.
        policy = replace(base_model(), is_shared=world.is_sharded or not parts.is_evaluation)
        if critic is None:
            return policy.build(world)
        return build_model([Part(source=policy, prefix="policy."), critic], world, ActorCritic)

    def task(world: World) -> tuple[Task, Sequence[Callback]]:
        most, bases = options.rl.max_tokens_per_microbatch, [base_model()] if is_built else []
        bases += [] if critic is None else [critic.source]
        roles = Roles(
            scorer=None if judge is None else scorer_of(judge, parts.tokenizer, most, loop, options.python_tests),
            reference_model=parts.reference_model(bases, reference, reward_source=judge),
            eos_ids=parts.tokenizer.eos_ids,
            environment_runner=environment_runner,
            event_loop=loop,
            tokenizer=parts.tokenizer,
            is_rewarded=scores is not None or (environment_runner is not None and environment_runner.has_rewards),
            compared=None if compared is None else compared(world),
        )
        made = kind(options, rows, roles, build, world, pretraining)
        return made, [
            SampleLogger(made, parts.tokenizer),
            RolloutLog(made, parts.tokenizer, options.rollout.keep_rollout_files, options.rl.updates_per_rollout),
        ]

    network = base_model().recorded() if is_built else None
    fingerprint = rows.fingerprint if pretraining is None else f"{rows.fingerprint} and {pretraining.fingerprint}"
    return TaskBuilder(task=task, fingerprint=fingerprint, network=network)


def online_dpo(parts: TaskInputs[OnlineDPOOptions]) -> TaskBuilder:
    """DPO on pairs of the policy's own completions; the default reference is the policy itself."""
    source, advantage = parts.frozen_base("reference", parts.options.reference), parts.options.rl.advantage
    check(advantage != "reinforce", "rl.advantage", advantage, "dr_grpo, which compares completions of a prompt")
    return policy_gradient(parts, OnlineDPOTask, partial(_compared_model, parts, source))


def distill(parts: TaskInputs[DistillOptions]) -> TaskBuilder:
    """On-policy distillation: the policy learns the distributions of a frozen teacher on its own completions."""
    options, given, roles = parts.options, parts.inputs.model, parts.inputs.roles
    named, source = roles.get("teacher", options.teacher), parts.frozen_base("teacher", options.teacher)

    def task(options: DistillOptions, rows: DatasetSplits[PromptExample], *others: Any) -> RolloutTask:
        has_prompts = any(each.teacher_tokens for each in (*rows.train, *rows.eval))
        is_missing = source is None and (parts.is_evaluation or not has_prompts)
        if is_missing or (not has_prompts and not parts.is_evaluation and named in (given, options.checkpoint)):
            raise ConfigError(
                f"{options.task} has no teacher" if is_missing else "a teacher that is the policy has no effect",
                got=f"teacher={named}, and rows {'with' if has_prompts else 'without'} a column {TEACHER_PROMPT}",
                expected="another model, or in training the policy with prompts of its own",
                fix='add teacher=RUN_OR_FOLDER or pass roles={"teacher": RUN}',
            )
        if has_prompts and roles.keys() & {"environment", "tools"}:
            got, expected = f"a column {TEACHER_PROMPT} and an environment", "completions of one turn"
            raise ConfigError("an environment has no prompt of the teacher's", got=got, expected=expected)
        return DistillTask(options, rows, *others)

    return policy_gradient(parts, task, partial(_compared_model, parts, source))


def _compared_model(parts: TaskInputs[Any], source: NetworkSource | None, world: World) -> ReferenceModel:
    """The frozen model of a loss, sharded like the policy, which is the default; none on a rank that trains nothing."""
    if not world.is_training:
        return ReferenceModel()
    given = parts.inputs.model
    base = source or parts.base_model(None if given is None else policy_of(given))
    known = source_fingerprint(base, world) if base.given is None else None
    return parts.reference_model([], base.frozen(world), known)


def _full_reference(parts: TaskInputs[RLOptions], base_model: Callable[[], NetworkSource]) -> nn.Module | None:
    """The reference model of RL, whole on this rank, as each rank has a different number of completions."""
    compared = parts.frozen_base("reference", parts.options.reference)
    if compared is None and parts.is_evaluation:
        return None
    return prepare_training((compared or base_model()).frozen(World(device=parts.device)), parts.options)


def _ptx_rows(parts: TaskInputs[RLOptions]) -> DatasetSplits[TokenizedExample] | None:
    options = parts.options
    source = parts.inputs.roles.get("ptx", options.ptx.data)
    check(source is None or options.ptx.coef > 0, "ptx.coef", options.ptx.coef, "above 0 with the role ptx")
    if options.ptx.coef == 0 or parts.is_evaluation:
        return None
    check(source is not None, "ptx.data", None, 'rows for ptx.coef: a file, or roles={"ptx": ROWS}')
    found = parts.read("demonstrations", (source, None), replace(options.data, eval_fraction=0.0))
    check(found.mixture is None, "ptx.data", "a mixture of sources", "files or rows without weights")
    return found


def _rewards(parts: TaskInputs[RLOptions], runner: EnvironmentRunner | None) -> Any:
    """The role or option `reward`, with what an environment class gives; None if an environment gives the rewards."""
    options = parts.options
    given = parts.inputs.roles.get("reward", options.reward)
    if runner is not None and runner.has_rewards:
        if given is None:
            return None
        raise ConfigError(
            "two roles compute rewards",
            got="the roles reward and environment",
            expected="one of them",
            fix="leave the role reward out: the environment's steps return the rewards",
        )
    if runner is not None and runner.own_rewards:
        named = {} if given is None else reward_members(given if isinstance(given, (list, Mapping)) else [given])
        both = ", ".join(named.keys() & runner.own_rewards.keys())
        check(
            not both, "the role reward", both, "another name than that of the environment class, which has get_reward"
        )
        return named | dict(runner.own_rewards)
    if given is None and isinstance(options, DistillOptions):
        coef = options.distill.reward_coef
        check(coef == 0, "distill.reward_coef", coef, "0 without a reward", "add reward=NAME")
        return None
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
    if not isinstance(source, (str, Path)) or not user_path(source).is_dir():
        return source
    folder = user_path(source)
    if is_adapter(folder):
        return adapted_reward_model(base_model(), folder)
    model = load_reward_model(folder, parts.device, parts.options.compile_level)
    return RewardModel(model=model, tokenizer=find_tokenizer_or_none(folder))


def _critic(
    parts: TaskInputs[RLOptions], scores: Any, reward_source: Callable[[], Any], base_model: Callable[[], NetworkSource]
) -> Part:
    """The critic: a value head model, initialized from the reward model if that reads the policy's tokens, else from
    the policy."""
    options, source, head = parts.options, None, None
    folder = next(iter(reward_folders(scores)), None) if isinstance(scores, (str, Path)) else None
    if folder is not None and not is_adapter(folder) and base_model().given is None:
        own = find_tokenizer_or_none(folder)
        if own is None or own.fingerprint == parts.tokenizer.fingerprint:
            source = NetworkSource(options=options).stored_as(partial(open_reward_model, folder))
    elif (found := None if reward_members(scores) else critic_init(reward_source(), parts.tokenizer)) is not None:
        # An initial adapter (lora.path) belongs to the policy's base model only.
        is_plain = config_of_network(found.backbone) is None
        lora = LoraOptions() if is_plain else replace(options.lora, path=None)
        source = NetworkSource(options=options, given=found.backbone, adapter=lora, is_shared=True)
        head = found.head()
    named = replace(source or base_model(), adapter_name="critic")
    return Part(source=named, head=value_head(head, options.seed, is_critic=True), prefix="critic.")
