"""`Trainer`, `pipeline`, and loading and saving of models. What a task is, its `Kit` knows."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from torch import nn

from kitforge.composition import (
    compose_config,
    compose_predict,
    dotted,
    full_name,
    nested,
    recorded_values,
    refuse_presets,
)
from kitforge.core.parallel.rendezvous import joined
from kitforge.foundation import device as devices
from kitforge.foundation.config import check, from_dict
from kitforge.foundation.dtype import EXPORT_DTYPES, ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.foundation.files import check_own, mark_own, user_path
from kitforge.foundation.log import noting_warnings
from kitforge.kits.kit import AnyKit, OwnTaskKit, Pipeline, ReplayResult, RunInputs
from kitforge.kits.registry import DEFAULT_TASK, kit_of, kit_of_folder
from kitforge.kits.start import apart_from_run, with_open_model
from kitforge.models.hub import resolve
from kitforge.report.notebook import Rows
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.options import RunOptions
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import Task

# A run, the folder of a run, a step or a Hugging Face model, or a network in memory.
Model: TypeAlias = Run | nn.Module | str | Path


class Trainer:
    """Trains, evaluates and predicts. `model` is a preset, a folder, a Run or an nn.Module; `options` are nested or
    dotted: `{"trainer.max_steps": 100}`. `task` is a name, or a Task of your own, which brings model and data.
    `processor` is a tokenizer, a preset or a folder of one, or the feature encoder of a recommender. Training leaves a
    Run as it was; an nn.Module is trained in place by the tasks that do not train a copy (docs/training.md)."""

    def __init__(
        self,
        task: str | Task,
        model: Model | None = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        *,
        roles: Mapping[str, object] | None = None,
        processor: object = None,
        output_dir: str | Path | None = None,
        options: Mapping[str, object] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        chosen = dict(options or {}) | ({} if output_dir is None else {"output_dir": str(output_dir)})
        self._datasets = (train_dataset, eval_dataset)
        self._callbacks = list(callbacks)
        for each in list[object](callbacks):
            if not isinstance(each, Callback):
                expected = "an instance of kitforge.trainer.callbacks.callback.Callback, with on_event(event, run)"
                raise ConfigError("this is not a callback", got=repr(each), expected=expected, fix="inherit from it")
        self._roles = dict(roles or {})
        self._run: Run | None = None
        self._network = model.model if isinstance(model, Run) else model if isinstance(model, nn.Module) else None
        self._model_folder = model.folder if isinstance(model, Run) else None
        if isinstance(task, Task):
            if any(given is not None for given in (model, train_dataset, eval_dataset, processor, roles)):
                fix = "give them to the task instead of to Trainer"
                raise ConfigError("a Task of your own brings its model and its data", fix=fix)
            self._kit: AnyKit = OwnTaskKit(task)
            self._processor: object = None
            self._model_name = type(task).__name__
            self.options: RunOptions = from_dict(RunOptions, nested(chosen))
            return
        self._kit = kit_of(task)
        for name in self._roles.keys() - set(self._kit.ROLES):
            raise ConfigError(f"this task has no role {name!r}", fix=nearest(name, self._kit.ROLES or ["none"]))
        for role, given in self._roles.items():
            refuse_presets(role, given)
        named = {}
        if isinstance(processor, (str, Path)):
            named["tokenizer"], processor = str(processor), None
        if model is not None and self._network is None:
            named["model"] = str(model)
        self._processor = model.processor if processor is None and isinstance(model, Run) else processor
        self._choices = named | chosen
        composition = compose_config(task, self._choices, has_network=self._network is not None)
        self._model_name = composition.model_name if self._network is None else type(self._network).__name__
        self.options = self._kit.read_options(composition.values)

    def train(self, resume: str | Path | None = None) -> Run:
        """Train and return the run. `resume`: "auto" for the newest checkpoint of output_dir, or a folder."""
        self.options, inputs = apart_from_run(self._kit, self.options, self._inputs())
        # The network of a Run that is loaded again is in memory only as long as the caller keeps the Run.
        self._network = None if inputs.model is None else self._network
        options = self.options if resume is None else dataclasses.replace(self.options, resume=str(resume))
        self._run = train_task(options, inputs, self._kit)
        return self._run

    fit = train

    def finetune(self, checkpoint: Run | str | Path) -> Run:
        """Train from the weights of a run, a step or a Hugging Face folder; everything else starts afresh."""
        if isinstance(self._kit, OwnTaskKit):
            raise ConfigError("a Task of your own builds its network itself", fix="load the weights in its build()")
        if self._network is not None:
            raise ConfigError("finetune() loads the checkpoint's own network", fix="leave model= out, or call train()")
        folder = checkpoint.folder if isinstance(checkpoint, Run) else _folder(checkpoint)
        self._model_name = folder.resolve().name
        given = {name: each for name, each in dotted(self._choices).items() if name.partition(".")[0] != "model"}
        fresh = self._kit.read_options(compose_config(self.options.task, given | {"checkpoint": str(folder)}).values)
        # A run that starts from weights has learning rates of its own.
        changes = {name: getattr(fresh, name) for name in (*self._kit.RATE_SECTIONS, "checkpoint", "model")}
        self.options = dataclasses.replace(self.options, **changes)
        return self.train()

    def evaluate(self) -> dict[str, float]:
        """The metrics of the evaluation set, for the trained run or else for the model as it was given."""
        options = self.options if self._run is None else self._kit.after_training(self.options, self._run)
        return evaluate(options, self._inputs(self._run), self._kit)

    def predict(self, inputs: str | Sequence[str]) -> list[dict[str, object]]:
        """One result per input: for text_generation, `{"generated_text": ...}`."""
        given, checkpoint = self._inputs(self._run), getattr(self.options, "checkpoint", None)
        source = checkpoint if given.model is None else given.model
        if source is None:
            raise ModelError("there is nothing to predict with yet", fix="call train() first, or use pipeline()")
        if self._kit.TEXT_TASK in (None, self.options.task):
            model = load_model(source, self.options.device, self._kit.load_dtype(self.options), self.options.task)
            opened = self._kit.open_pipeline(model, given.processor or load_processor(source), self.options)
        else:
            opened = pipeline(self.options.task, source, given.processor, {"device": self.options.device})
        found = opened([inputs] if isinstance(inputs, str) else list(inputs))
        return Rows(result[0] if isinstance(result, list) else result for result in found)

    def _inputs(self, run: Run | None = None) -> RunInputs[object]:
        """The objects that were handed over, with the network and processor of the run, if there is one."""
        return RunInputs(
            train_dataset=self._datasets[0],
            eval_dataset=self._datasets[1],
            model=self._network if run is None else run.model,
            model_folder=self._model_folder if run is None else run.folder,
            initial_model=None if run is None else self._network,
            processor=self._processor if run is None else run.processor,
            roles=self._roles,
            callbacks=self._callbacks,
            model_name=self._model_name,
        )


def train_task(options: RunOptions, inputs: RunInputs[object], kit: AnyKit | None = None) -> Run:
    """Train a task by its options and the objects handed over."""
    kit = kit_of(options.task) if kit is None else kit
    if options.trainer.foresee:
        from kitforge.foresight import foreseeing

        inputs = foreseeing(kit, options, inputs)
    with joined(options.parallel, options.device, options.num_ranks) as rendezvous:
        with noting_warnings() as notes:
            inputs = with_open_model(options, inputs)
            assembly = kit.assemble(options, inputs, rendezvous)
        return assembly.train(notes)


def evaluate(options: RunOptions, inputs: RunInputs[object], kit: AnyKit | None = None) -> dict[str, float]:
    """The metrics of the evaluation set for a model in memory or under `options.checkpoint`."""
    kit = kit_of(options.task) if kit is None else kit
    with joined(options.parallel, options.device, options.num_ranks) as rendezvous:
        return kit.evaluate(options, with_open_model(options, inputs), rendezvous)


def pipeline(
    task: str, model: Model, processor: object = None, options: Mapping[str, object] | None = None
) -> Pipeline:
    """Inference on inputs of the task, with a run, a step, a Hugging Face folder, a Run, or a model in memory."""
    # A policy answers by the options of text generation.
    task = kit_of(task).TEXT_TASK or task
    kit = kit_of(task)
    chosen = kit.read_options(compose_predict(task, dict(options or {}), model=model).values)
    if isinstance(processor, (str, Path)):
        processor = load_processor(processor)
    network = load_model(model, chosen.device, kit.load_dtype(chosen), task)
    return kit.open_pipeline(network, processor or load_processor(model), chosen)


def replay(folder: str | Path, step: int, changes: Mapping[str, object] | None = None) -> ReplayResult:
    """Train a step of a run again from its kept rollouts, with `changes` to its options."""
    run_folder = _folder(folder)
    if not (run_folder / "config.yaml").is_file():
        raise ModelError("there is no run in this folder", got=run_folder, expected="a run folder with a config.yaml")
    kit = kit_of_folder(run_folder)
    for name in changes or {}:
        full_name(name, None, kit.OPTIONS)
    values = recorded_values(run_folder / "config.yaml", changes or {}, kit.OPTIONS)
    return kit.replay(run_folder, step, kit.read_options(values))


def load_model(model: Model, device: str = "auto", dtype: LoadDtype = "fp32", task: str | None = None) -> nn.Module:
    """The network of a run, step or Hugging Face folder, weights in `dtype` ("auto": as stored); a model as it is. A
    Hugging Face folder of a decoder with one output is a reward model, or with `task="text_classification"` a
    regression."""
    if isinstance(model, (Run, nn.Module)):
        return model.model if isinstance(model, Run) else model
    folder = _folder(model)
    return kit_of_folder(folder, task).load(folder, devices.pick(device), dtype=dtype).eval()


def load_processor(model: Model) -> object:
    """The processor of a run, a step or a Hugging Face folder: its tokenizer, or a recommender's feature encoder."""
    if isinstance(model, Run):
        return model.processor
    if isinstance(model, nn.Module):
        raise ConfigError("a model in memory comes without a processor", fix="pass processor=, its tokenizer, as well")
    folder = _folder(model)
    return kit_of_folder(folder).find_processor(folder)


def save_model(
    model: Model,
    folder: str | Path,
    processor: object = None,
    dtype: ExportDtype | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a model for other programs: a language model or a reward model as a Hugging Face folder, or a GGUF file if
    `folder` ends in .gguf; the items of a retrieval model as a faiss index. `dtype` of the weights: float32, bfloat16,
    float16 or, in GGUF files, q8_0; by default as published, else float32. One tensor at a time is in memory. Raises
    ConfigError for what another program wrote there, without `overwrite`."""
    names = (*EXPORT_DTYPES, "q8_0")
    check(dtype is None or dtype in names, "dtype", dtype, f"one of {', '.join(names)}, or null")
    path = user_path(folder)
    check_own(path, "export", overwrite=overwrite)
    source = model if isinstance(model, (Run, nn.Module)) else _folder(model)
    if processor is None and not isinstance(source, nn.Module):
        processor = load_processor(source)
    home = source.folder if isinstance(source, Run) else None if isinstance(source, nn.Module) else source
    kit = kit_of(DEFAULT_TASK) if home is None or not home.exists() else kit_of_folder(home)
    kit.save(source, path, processor, dtype)
    mark_own(path, "export")


def _folder(model: str | Path) -> Path:
    refuse_presets("model", str(model))
    return resolve(model)
