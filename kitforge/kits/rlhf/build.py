"""The RLHF kit: its tasks, and how a run of one is assembled, evaluated, loaded and saved."""

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.mixture import weighted_sources
from kitforge.data.tokenizers.loading import ByteTokenizer, Tokenizer, find_tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import mark_own
from kitforge.foundation.types import MicroBatch
from kitforge.foundation.untrusted import load_yaml, names_function
from kitforge.inference.server.scores import ScoreService
from kitforge.kits.batch_predict import Predict, predict_rows, prediction_files
from kitforge.kits.dry_task import rows_at_once, traced_task
from kitforge.kits.kit import LoadModel, Prepared, ReplayResult
from kitforge.kits.language_model import (
    TRAINING_ONLY_OPTIONS,
    SaveAdapter,
    SaveTokenizer,
    check_whole_rows,
    export_language_model,
)
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import check_splits
from kitforge.kits.rlhf import tasks
from kitforge.kits.rlhf.config import (
    EnvironmentOptions,
    KTOOptions,
    PreferenceOptions,
    RewardOptions,
    RLOptions,
    SFTOptions,
    StageOptions,
)
from kitforge.kits.rlhf.inspection import loss_mask_lines
from kitforge.kits.rlhf.on_policy_config import DistillOptions, OnlineDPOOptions
from kitforge.kits.rlhf.pipeline import BATCH_SIZE, RewardPipeline, Scored, scored_rows
from kitforge.kits.rlhf.reinforcement.ppo import RolloutTask
from kitforge.kits.rlhf.replay import replay
from kitforge.kits.rlhf.roles.model_loading import load_policy, load_reward_model, open_policy, open_reward_model
from kitforge.kits.rlhf.roles.rewards import find_function, reward_reference
from kitforge.kits.rlhf.roles.role_checks import DisableDropout, check_role_tokenizers
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, policy_of
from kitforge.kits.rlhf.tasks import Inputs, TaskBuilder, TaskInputs, task_inputs_of
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run
from kitforge.trainer.step_trace import TracedTask
from kitforge.trainer.task import Task


class RlhfKit(NetworkKit[StageOptions, Tokenizer], ABC):
    """The kit of one RLHF task: its options, the builder of its `Task`, and how its rows are read."""

    TEXT_TASK: str | None = "text_generation"

    def __init__(
        self,
        options: type[StageOptions],
        build_task: Callable[[TaskInputs[Any]], TaskBuilder],
        reads: Callable[[ChatDatasetReader, object], Iterator[Any]],
        roles: tuple[str, ...] = (),
        fine_tuning: str = "finetune_policy",
    ) -> None:
        self.OPTIONS = options
        self.FINE_TUNING = fine_tuning
        self.ROLES = roles
        self.RATE_SECTIONS = ("optimizer", "critic") if options is RLOptions else ("optimizer",)
        self.build_task = build_task
        self._reads = reads

    def prepare(
        self, options: StageOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[StageOptions, Tokenizer]:
        """Rows, tokenizer and models. Raises ConfigError for a role whose tokenizer does not fit the policy's."""
        named = getattr(options, "environment", EnvironmentOptions()).name
        if named is not None and "environment" not in inputs.roles:
            inputs = dataclasses.replace(inputs, roles={**inputs.roles, "environment": find_function(named)})
        parts = task_inputs_of(options, inputs, rendezvous.device, rank=rendezvous.rank, is_evaluation=is_evaluation)
        tokenizer = parts.tokenizer
        check_role_tokenizers(options, inputs.roles, tokenizer)
        builder = self.build_task(parts)
        recorded = to_dict(options) | {"model": builder.network}
        if inputs.model_folder is not None:
            recorded["checkpoint"] = str(inputs.model_folder)
        # By their folder or the name of their function, if they have one.
        given = {role: inputs.roles.get(role) for role in ("reward", "reference", "teacher") if role in recorded}
        recorded |= {role: reward_reference(each) for role, each in given.items() if each is not None}

        def task(world: World) -> tuple[Task, list[Callback]]:
            made, task_callbacks = builder.task(world)
            dropout_callbacks = [] if isinstance(options, SFTOptions) else [DisableDropout()]
            adapter = SaveAdapter(_adapted, options.checkpoint, tokenizer)
            return made, [SaveTokenizer(tokenizer), adapter, *dropout_callbacks, *task_callbacks]

        return Prepared(
            options=options,
            recorded=recorded,
            fingerprints={"training rows": builder.fingerprint},
            processor=tokenizer,
            task=task,
        )

    def check_parallel(self, options: StageOptions) -> None:
        """Raise ConfigError for parallel axes that the task does not support, before any rank starts."""
        options.lora.check_parallel(options.parallel)
        check_whole_rows(options.parallel)
        check_splits(options)

    def plan(self, options: StageOptions) -> TracedTask:
        """The step of rows that stand in for data; a policy that lies in a folder is planned as a new one."""
        home = options.checkpoint
        config = self.new_config(options) if home is None else open_policy(resolve(home)).config
        data = dataclasses.replace(options.data, train=None, eval=None, columns={}, num_workers=1)
        trainer = dataclasses.replace(options.trainer, progress=False)
        planned = dataclasses.replace(options, data=data, trainer=trainer, checkpoint=None)
        return traced_task(self, planned, config, self.dry_inputs(options, config))

    def dry_micro_batches(self, task: Task, model: nn.Module) -> Sequence[MicroBatch]:
        if isinstance(task, RolloutTask):
            task.recorded = task.dry_rollouts
        return super().dry_micro_batches(task, model)

    def dry_generation(self, task: Task, model: nn.Module) -> Sequence[Tensor]:
        return task.dry_cache(model) if isinstance(task, RolloutTask) else ()

    def dry_inputs(self, options: StageOptions, config: Any) -> Inputs:
        """Rows of which all but a token is an answer, or prompts that leave room for completions."""
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size = config.vocab_size
        roles: dict[str, Any] = {}
        if isinstance(options, RLOptions):
            room = options.data.sequence_length - options.rollout.max_new_tokens
            rows: list[dict[str, Any]] = [{"prompt": "a" * room, "teacher_prompt": "b" * room}]
            roles = {"reward": "exact"} if options.reward is None else {}
        else:
            # An answer ends with a token of its own.
            good, bad = (letter * (options.data.sequence_length - 2) for letter in "bc")
            columns = {"chosen": good, "rejected": bad}
            columns = {"completion": good} if isinstance(options, (SFTOptions, KTOOptions)) else columns
            rows = [{"prompt": "a", "label": is_good, **columns} for is_good in (True, False)]
        held_out = rows * rows_at_once(options) * options.parallel.num_replicas
        return Inputs(train_dataset=rows, eval_dataset=held_out, processor=tokenizer, roles=roles)

    def evaluation_options(self, recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded options of a run that its evaluation takes over. Raises ConfigError for code that
        only config.yaml names: code named by data is not run."""
        for name, argument in _code_arguments(recorded).items():
            if not {name, f"{name}.name"} & chosen.keys():
                raise ConfigError(
                    "a file cannot name code to run",
                    got=f"{argument} in the run's config.yaml",
                    expected="the function or the class, named on the command line",
                    fix=f"add {argument} if you trust it",
                )
        return {name: value for name, value in recorded.items() if name not in TRAINING_ONLY_OPTIONS}

    def inspect_rows(self, options: StageOptions) -> Iterator[str]:
        parts = task_inputs_of(options, Inputs(), torch.device("cpu"))
        check(options.data.train is not None, "data.train", None, "a file of rows to inspect")
        entries = weighted_sources(options.data.train, ("columns",))
        if entries is None:
            return loss_mask_lines(self._reads(parts.reader, options.data.train), parts.tokenizer)
        readers = [parts.reader.with_columns(each.options.get("columns", parts.reader.columns)) for each in entries]
        total = sum(each.weight for each in entries)
        return chain.from_iterable(
            (
                f"source {each.name}, {each.weight / total:.1%} of the samples",
                *loss_mask_lines(self._reads(reader, each.source), parts.tokenizer),
            )
            for each, reader in zip(entries, readers, strict=True)
        )

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        return load_policy(folder, device, level, dtype)

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The language model of a run or step; reads no weights yet."""
        return open_policy(folder, open_run)

    def trains_given_network(self, options: StageOptions) -> bool:
        """Only sft does, of all weights; adapters share the given weights, and the other tasks train a copy."""
        return isinstance(options, SFTOptions) and not options.lora.is_on

    def after_training(self, options: StageOptions, run: Run) -> StageOptions:
        """Options for evaluating the run: its folder as the checkpoint, which records reference and rewards."""
        return dataclasses.replace(options, checkpoint=str(run.folder))

    def next_steps(self, folder: Path) -> list[str]:
        recorded = load_yaml((folder / "config.yaml").read_text())
        named = "".join(f" {argument}" for argument in _code_arguments(recorded).values())
        return [f"kitforge evaluate checkpoint={folder} data.eval=FILE{named}", f"kitforge report {folder}"]


class PolicyKit(RlhfKit):
    """The kit of a task that trains a policy and logs no rollouts."""


class RolloutKit(RlhfKit):
    """The kit of a task that logs its rollouts."""

    def replay(self, folder: Path, step: int, options: StageOptions) -> ReplayResult:
        return replay(folder, step, cast(RLOptions, options), self.build_task)


class RewardKit(RlhfKit):
    """The kit of a reward model, which scores texts."""

    TEXT_TASK = None
    IS_SERVED = True

    def open_pipeline(self, model: nn.Module, tokenizer: Tokenizer, options: StageOptions) -> RewardPipeline:
        """A pipeline that scores text."""
        assert isinstance(model, ValueHeadModel)
        return RewardPipeline(model, tokenizer)

    def open_service(self, model: nn.Module, tokenizer: Tokenizer, name: str, options: StageOptions) -> ScoreService:
        pipeline = self.open_pipeline(model, tokenizer, options)
        return ScoreService(pipeline.model, pipeline.score_texts, name, cast(RewardOptions, options).serve)

    def predict_file(self, options: StageOptions, load_model: LoadModel) -> Path:
        """Write the rows of `data.eval`, each with its `score`, to the file `output`."""
        folder, target = prediction_files(options, "data.eval=rows.jsonl output=scores.jsonl")
        check(target.suffix == ".jsonl", "output", target, "a file .jsonl for a reward model")
        rows = scored_rows(find_tokenizer(folder), options.data)

        def opened(model: nn.Module, folder: Path) -> Predict[Scored]:
            scores = self.open_pipeline(model, find_tokenizer(folder), options).scores
            return lambda part: (
                {**row, "score": score}
                for (row, _), score in zip(part, scores([tokens for _, tokens in part]), strict=True)
            )

        predict_rows(options, iter(lambda: list(islice(rows, BATCH_SIZE)), []), load_model, opened)
        mark_own(target, "predict")
        return target

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The model of a run, step or Hugging Face folder, always in fp32."""
        return load_reward_model(folder, device, level)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
        """Write a Hugging Face folder, from the run folder if there is one."""
        if isinstance(source, Run) and source.folder.is_dir():
            source = source.folder
        if isinstance(source, Path):
            export_language_model(open_reward_model(source), folder, processor, dtype)
        else:
            super().save(source, folder, processor, dtype)

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """Raises ModelError: a reward model writes no text."""
        expected = "a run of a task that trains a policy"
        raise ModelError("this run holds no language model", got=f"a reward model in {folder}", expected=expected)


def _code_arguments(recorded: Mapping[str, Any]) -> dict[str, str]:
    """The command-line options that name the code of a run: its rewards and its environment."""
    reward, environment = recorded.get("reward"), (recorded.get("environment") or {}).get("name")
    found = {} if environment is None else {"environment": f"environment={environment}"}
    if names_function(reward):
        several = [each[1] for each in reward.values()] if isinstance(reward, Mapping) else reward
        found["reward"] = (
            f"reward=[{','.join(map(str, several))}]" if isinstance(several, list) else f"reward={several}"
        )
    return found


def _adapted(model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
    """The adapted language model of a policy or a reward model, its adapter's name, and the head."""
    if isinstance(model, ValueHeadModel):
        return model.backbone, "reward", model.head()
    return policy_of(model), "policy", None


_ROLES = ("reward", "reference", "environment", "tools", "ptx")
TASKS: dict[str, RlhfKit] = {
    "sft": PolicyKit(SFTOptions, tasks.sft, ChatDatasetReader.demonstrations, fine_tuning="finetune_sft"),
    "reward": RewardKit(RewardOptions, tasks.reward, ChatDatasetReader.pairs, fine_tuning="finetune_reward"),
    "ppo": RolloutKit(RLOptions, tasks.policy_gradient, ChatDatasetReader.prompts, _ROLES, "finetune_ppo"),
    **{
        name: RolloutKit(RLOptions, tasks.policy_gradient, ChatDatasetReader.prompts, _ROLES)
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
    },
    "online_dpo": PolicyKit(OnlineDPOOptions, tasks.online_dpo, ChatDatasetReader.prompts, _ROLES[:-1]),
    "distill": RolloutKit(DistillOptions, tasks.distill, ChatDatasetReader.prompts, (*_ROLES, "teacher")),
    **{
        name: PolicyKit(PreferenceOptions, tasks.preference, ChatDatasetReader.pairs, ("reference",))
        for name in ("dpo", "ipo", "orpo", "simpo")
    },
    "kto": PolicyKit(KTOOptions, tasks.kto, ChatDatasetReader.unpaired, ("reference",)),
}
