"""The kit interface: what the trainer front end and the command line know of a task.

A kit is a package with a dict `TASKS: dict[str, Kit]`. `Kit` is abstract in one method, `prepare`; all others have
defaults, which raise ConfigError for what a task does not support. `TaskKit` is a whole kit around one `Task`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.foundation.config import from_dict, option_names, to_dict, to_yaml
from kitforge.foundation.dtype import ExportDtype, LoadDtype, Precision
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.types import Cursor, MicroBatch
from kitforge.inference.server.app import create_score_app
from kitforge.inference.server.application import HttpService
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.report.config_diff import NOTE
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.dropped_options import without_dropped
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions, check_copies, check_offload, check_schedule
from kitforge.trainer.precision import autocast, use_precision
from kitforge.trainer.run_folder import Run, claim, default_folder, make_loop, train
from kitforge.trainer.step_trace import TracedTask
from kitforge.trainer.task import Task

OptionsT = TypeVar("OptionsT", bound=RunOptions)
# What reads the rows of a task: a tokenizer, or the feature encoder of a recommender.
ProcessorT = TypeVar("ProcessorT")
# Loads the model of a folder, whichever task trained it, onto the device of that name, in that dtype.
LoadModel: TypeAlias = Callable[[str, str, LoadDtype], nn.Module]
# Inference: called with one input or a list of them. Kits add methods of their own (`stream`, `retrieve`).
Pipeline: TypeAlias = Callable[..., Any]
# Options by name, nested.
OptionValues: TypeAlias = dict[str, Any]


# Without slots: Python 3.11 cannot make an instance of a frozen, slotted generic dataclass through RunInputs[int].
@dataclass(frozen=True, kw_only=True)
class RunInputs(Generic[ProcessorT]):
    """Objects that a caller hands over instead of naming them in the options."""

    train_dataset: Any = None
    eval_dataset: Any = None
    model: nn.Module | None = None
    model_folder: Path | None = None  # the run that `model` came from, if it came from one
    initial_model: nn.Module | None = None  # for the evaluation of a trained model: the model that training began with
    # Opens the model under the checkpoint if another task trained it.
    open_model: Callable[..., StoredModel] | None = None
    processor: ProcessorT | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    model_name: str = "model"


@dataclass(frozen=True, kw_only=True)
class RunAssembly(Generic[OptionsT, ProcessorT]):
    """A run ready to start."""

    loop: Loop
    folder: Path
    processor: ProcessorT
    options: OptionsT
    config_text: str  # of config.yaml

    def train(self, notes: Sequence[str] = ()) -> Run:
        """Train, from the checkpoint that `options.resume` names if it does. The notes are warnings about the inputs,
        which stand in config.yaml and in the report."""
        config_text = self.config_text + "".join(f"{NOTE}{note}\n" for note in notes)
        with claim(self.options, self.folder):
            metrics = train(self.loop, self.options, self.folder, config_text)
        model, was_interrupted = self.loop.model, self.loop.was_interrupted
        return Run(
            folder=self.folder, model=model, processor=self.processor, metrics=metrics, was_interrupted=was_interrupted
        )


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[OptionsT, ProcessorT]):
    """Everything of a run that is read before ranks wait for one another."""

    options: OptionsT
    recorded: OptionValues  # the options as config.yaml and checkpoints record them
    fingerprints: Mapping[str, str]  # of the rows, by their name in messages; the same on all ranks
    processor: ProcessorT
    task: Callable[[World], tuple[Task, Sequence[Callback]]]  # the task, and the callbacks that it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The metrics of a step, as recorded in metrics.jsonl and as replayed."""

    step: int
    start: int  # step of the checkpoint that the replay started from
    recorded: dict[str, float]
    replayed: dict[str, float]

    @property
    def is_same(self) -> bool:
        """Whether all metrics are equal, bit for bit."""
        return self.recorded == self.replayed


class Kit(ABC, Generic[OptionsT, ProcessorT]):
    """One task: its options, and how it is trained, evaluated, loaded, saved and served."""

    OPTIONS: type[OptionsT]  # the dataclass of all its options
    ROLES: tuple[str, ...] = ()  # names of further models or callables that `Trainer(roles=...)` takes
    FINE_TUNING: str | None = None  # optimizer preset of runs that start from weights; None: the same as from scratch
    RATE_SECTIONS: tuple[str, ...] = ("optimizer",)  # sections of options that such a preset sets
    TEXT_TASK: str | None = None  # the task whose options generate text with its models; None: they give scores
    PREDICTS_AS_TRAINED: bool = False  # whether predictions take the columns and limits of the run's options
    IS_SERVED: bool = False  # whether open_service is implemented; otherwise its models are served by TEXT_TASK

    def read_options(self, values: Mapping[str, Any]) -> OptionsT:
        """The options from a plain dict. Raises ConfigError."""
        options = from_dict(self.OPTIONS, without_dropped(values, option_names(self.OPTIONS)))
        check_offload(options)
        check_schedule(options)
        check_copies(options)
        return options

    def check_parallel(self, options: OptionsT) -> None:
        """Raise ConfigError for parallel degrees that cannot be, before a rank is started. Default: all can."""

    @abstractmethod
    def prepare(
        self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[OptionsT, ProcessorT]:
        """Read what a run needs, in the order in which mistakes are cheapest to find. All ranks call it."""

    def assemble(
        self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous
    ) -> RunAssembly[OptionsT, ProcessorT]:
        """A run ready to start. All ranks call it."""
        prepared = self.prepare(options, inputs, rendezvous, is_evaluation=False)
        world, recorded = self.join(prepared, rendezvous)
        default_folder(options, inputs.model_name)  # refuses one that is a file on every rank, before a task is built
        task, callbacks = prepared.task(world)
        claimed = default_folder(options, inputs.model_name, is_claimed=True) if world.rank == 0 else None
        folder = cast(Path, world.broadcast_object(claimed))
        with claim(options, folder):
            loop = make_loop(
                task,
                replace(prepared.options, device=str(world.device)),
                folder,
                world=world,
                config=recorded,
                callbacks=[*(inputs.callbacks if world.is_training else ()), *callbacks],
            )
        return RunAssembly(
            loop=loop,
            folder=folder,
            processor=prepared.processor,
            options=prepared.options,
            config_text=to_yaml(recorded),
        )

    def join(self, prepared: Prepared[OptionsT, ProcessorT], rendezvous: Rendezvous) -> tuple[World, OptionValues]:
        """Join the process group, and check that all ranks have the same options and rows: the world, and the recorded
        options."""
        options, recorded = prepared.options, prepared.recorded
        world = rendezvous.init_process_group().with_precision(options.precision)
        # A rank that builds no network takes its options from rank 0.
        network = world.broadcast_object(recorded.get("model"))
        if "model" in recorded and recorded["model"] is None:
            recorded = recorded | {"model": network}
        rendezvous.check_same({"configuration": to_yaml(recorded), **prepared.fingerprints})
        return world, recorded

    def evaluate(self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous) -> dict[str, float]:
        """Metrics of the evaluation set, for `inputs.model` or the model under `options.checkpoint`."""
        prepared = self.prepare(options, inputs, rendezvous, is_evaluation=True)
        world = rendezvous.init_process_group().with_precision(prepared.options.precision)
        task, _ = prepared.task(world)
        model = task.build(world)
        metrics = evaluate_model(task, parallel_model_of(model, world), world.device, prepared.options.precision)
        task.on_run_end()
        return metrics

    def evaluation_options(self, recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> OptionValues | None:
        """The options of a run's config.yaml that its evaluation starts from. Default: None, the task's defaults."""
        return None

    def trains_given_network(self, options: OptionsT) -> bool:
        """Whether training changes the network of `RunInputs.model` itself. Default: it does; no copy is trained."""
        del options
        return True

    def after_training(self, options: OptionsT, run: Run) -> OptionsT:
        """The options for evaluating the trained model of `run` in memory. Default: those of the training."""
        return options

    def evaluate_benchmarks(self, options: OptionsT, load_model: LoadModel) -> dict[str, float]:
        """Metrics of the benchmarks that `options.tasks` names."""
        raise self._unsupported("has no benchmarks")

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The model of a run folder or a step folder, its weights in `dtype`."""
        raise self._unsupported("does not load models", "build the network, then load its state dict")

    def load_dtype(self, options: OptionsT) -> LoadDtype:
        """The dtype in which a pipeline or a server loads weights."""
        del options
        return "fp32"

    def find_processor(self, folder: Path) -> ProcessorT:
        """The processor that lies with a run or a step."""
        raise self._unsupported("keeps no processor with its runs")

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The language model of a folder, none of its weights read yet."""
        raise self._unsupported("trains no language model")

    def save(self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None) -> None:
        """Write a model for other programs; that of a folder with one tensor at a time in memory."""
        raise self._unsupported("exports no models")

    def export_program(self, options: OptionsT) -> list[Path]:
        """Write the model under `options.checkpoint` as a program, in `options.format`; the files written."""
        raise self._unsupported("has no torch.export program")

    def open_pipeline(self, model: nn.Module, processor: ProcessorT, options: OptionsT) -> Pipeline:
        """Inference with a model in memory."""
        raise self._unsupported("has no pipeline", "call the network: train().model(...)")

    def predict_file(self, options: OptionsT, load_model: LoadModel) -> Path:
        """Write a prediction for each row of `options.data.eval` to `options.output`."""
        raise self._unsupported("predicts no files", f'score rows with pipeline("{options.task}", model=RUN)')

    def open_service(self, model: nn.Module, processor: ProcessorT, name: str, options: OptionsT) -> HttpService:
        """The HTTP service of a model in memory."""
        raise self._unsupported("is not served over HTTP")

    def new_app(self, service: Any) -> Any:
        """The FastAPI application of what `open_service` gave. Default: the routes of a model that scores texts."""
        return create_score_app(service)

    def replay(self, folder: Path, step: int, options: OptionsT) -> ReplayResult:
        """Train a step of a run again from its kept rollouts."""
        raise self._unsupported("keeps no rollouts to replay", "resume from a checkpoint before the step")

    def resolved(self, options: OptionsT) -> OptionValues:
        """All options, with the defaults of the model unless a checkpoint brings it."""
        return to_dict(options)

    def plan(self, options: OptionsT) -> TracedTask:
        """What a plan traces, without data; `options.device` is the type of the planned device, which need not be
        here."""
        raise self._unsupported("is not planned", "kitforge plan task=text_generation plans its network")

    def dry_micro_batches(self, task: Task, model: nn.Module) -> Sequence[MicroBatch]:
        """Those of a step that is planned, of rows that stand in for data. Default: of the task's first step."""
        return next(task.steps(model, Cursor()))

    def dry_generation(self, task: Task, model: nn.Module) -> Sequence[Tensor]:
        """The keys and values that the task holds while it generates what it trains on. Default: it does not."""
        return ()

    def describe_data(self, spec: object, schema_file: Path | None = None) -> RenderableType:
        """What a file of rows holds, for a terminal; its proposed schema goes to `schema_file`."""
        raise self._unsupported("describes no data")

    def inspect_rows(self, options: OptionsT) -> Iterator[str]:
        """The first training rows with their loss mask, line by line."""
        raise self._unsupported("shows no rows", "kitforge inspect FILE describes a table; task=sft shows a loss mask")

    def describe_presets(self, presets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
        """A table row for each model preset that belongs to the task."""
        return []

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [f"kitforge report {folder}"]

    def _unsupported(self, what: str, fix: str | None = None) -> ConfigError:
        return ConfigError(f"this task {what}", got=f"task={self.OPTIONS().task}", fix=fix)


# A kit of any options and any processor.
AnyKit: TypeAlias = Kit[Any, Any]


class TaskKit(Kit[OptionsT, ProcessorT]):
    """A kit around a `Task`: `task` builds it, the rest is the same for every task."""

    def __init__(self) -> None:
        self._trained: tuple[nn.Module, Loop] | None = None

    @abstractmethod
    def task(self, options: OptionsT, inputs: RunInputs[ProcessorT]) -> Task:
        """The network, the data and the loss."""

    def processor(self, options: OptionsT, inputs: RunInputs[ProcessorT]) -> Any:
        """What reads rows, kept in `Run.processor`. Default: the one that was handed over, else None."""
        return inputs.processor

    def prepare(
        self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[OptionsT, ProcessorT]:
        return Prepared(
            options=options,
            recorded=to_dict(options),
            fingerprints={},
            processor=self.processor(options, inputs),
            task=lambda _world: (self.task(options, inputs), ()),
        )

    def assemble(
        self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous
    ) -> RunAssembly[OptionsT, ProcessorT]:
        assembly = super().assemble(options, inputs, rendezvous)
        self._trained = assembly.loop.model, assembly.loop
        return assembly

    def evaluate(self, options: OptionsT, inputs: RunInputs[ProcessorT], rendezvous: Rendezvous) -> dict[str, float]:
        """Metrics of the task, of the model that was trained last or of a new one."""
        if self._trained is None or self._trained[0] is not inputs.model:
            # Nothing is written, so no new folder is made.
            options = replace(options, output_dir=options.output_dir or "runs/latest")
            return self.assemble(options, inputs, rendezvous).loop.evaluate()
        return self._trained[1].evaluate()


class OwnTaskKit(TaskKit[RunOptions, None]):
    """A user's own `Task`, which brings its network and its data."""

    OPTIONS = RunOptions

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._task = task

    def task(self, options: RunOptions, inputs: RunInputs[None]) -> Task:
        """The task that was handed over."""
        return self._task


NetworkT = TypeVar("NetworkT", bound=nn.Module)


def expect_network(
    model: nn.Module, kind: type[NetworkT], complaint: str, expected: str, fix: str | None = None
) -> NetworkT:
    """`model`, which is to be of that class. Raises ModelError with `complaint` for another."""
    if not isinstance(model, kind):
        raise ModelError(complaint, got=type(model).__name__, expected=expected, fix=fix)
    return model


def datasets(options: Any, inputs: RunInputs[ProcessorT], *, is_evaluation: bool) -> tuple[object, object]:
    """What names the training and the evaluation rows: the objects handed over, else `options.data`. An evaluation
    reads the training rows only if the evaluation rows are split off them."""
    train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
    evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
    return None if is_evaluation and evaluation is not None else train, evaluation


def evaluate_model(task: Task, parallel: ParallelModel, device: torch.device, precision: Precision) -> dict[str, float]:
    """Metrics of a model outside of a run. Gathered parameters are sharded again, and its mode is restored."""
    model = parallel.model
    use_precision(model, precision, device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(device, precision):
            return task.evaluate(model)
    finally:
        parallel.reshard()
        model.train(was_training)
