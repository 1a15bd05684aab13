"""Names become objects. Below this file everything is built from dataclasses.

The kits are one dict; a kit is imported when a task of it is first asked for.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, final

from torch import nn

from kitforge.composition import (
    Composition,
    FineTuning,
    check_name,
    compose,
    compose_over,
    dotted,
    nested,
    presets,
    read_yaml,
    recipe_task,
    recorded_values,
    to_plain_dict,
)
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.foundation import device as devices
from kitforge.foundation.config import check, from_dict, to_dict, to_yaml
from kitforge.foundation.dtype import EXPORT_DTYPES
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.models.loading import is_reward_model
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.run_folder import Run, default_folder, make_loop, train
from kitforge.trainer.task import Task


@cache
def _transformers() -> Any:
    from kitforge.kits.transformers import build

    return build


@cache
def _recommender() -> Any:
    from kitforge.kits.recommender import build

    return build


def _rlhf(stage: str) -> Callable[[], Any]:
    """What gives a stage of the alignment kit."""

    def stage_of_kit() -> Any:
        from kitforge.kits.rlhf.build import TASKS

        return TASKS[stage]

    return stage_of_kit


RLHF_TASKS = (
    *("sft", "reward", "dpo", "ipo", "kto", "orpo", "simpo"),
    *("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"),
)
DEFAULT_TASK = "text_generation"
SCORING_TASKS = ("recommendation", "reward")  # their runs give scores, all others continue text
KITS: dict[str, Callable[[], Any]] = {
    "recommendation": _recommender,
    "text_generation": _transformers,
    **{stage: _rlhf(stage) for stage in RLHF_TASKS},
}


def kit_of(task: str) -> Any:
    """The kit that has the task; raises ConfigError naming the nearest one."""
    if task not in KITS:
        raise ConfigError(f"unknown task {task!r}", fix=nearest(task, KITS))
    return KITS[task]()


def recorded_task(folder: Any) -> str | None:
    """The task that a run, or one of its steps, was trained for; None where nothing says so."""
    if not isinstance(folder, (str, Path)):
        return None
    if (config := recorded_config(folder)) is None:
        return "reward" if is_reward_model(Path(folder).expanduser()) else None
    task = read_yaml(config).get("task")
    return task if isinstance(task, str) and task in KITS else None


def recorded_config(folder: str | Path) -> Path | None:
    """Where a run, or the one that a step is of, wrote down its options; None for another folder."""
    path = Path(folder).expanduser()
    # A step lies in RUN/checkpoints/.
    found = (parent / "config.yaml" for parent in (path, path.resolve().parent.parent))
    return next((each for each in found if each.is_file()), None)


def task_of(choices: Mapping[str, Any]) -> str:
    """The task that is asked for: by name, else the one that a checkpoint was trained for, else a recipe's own."""
    named = choices.get("task") or recorded_task(choices.get("checkpoint")) or recipe_task(choices.get("recipe"))
    return str(named or DEFAULT_TASK)


def text_task_of(choices: Mapping[str, Any]) -> str:
    """The task whose options continue text: every policy is a language model. Raises ConfigError for what scores."""
    if (task := task_of(choices)) in SCORING_TASKS:
        raise ConfigError(
            f"a run of {task} gives scores and writes no text",
            got=f"checkpoint={choices.get('checkpoint')}",
            expected="a run of text_generation or of a stage that trains a policy",
            fix="score a file: kitforge predict checkpoint=RUN data.eval=FILE output=FILE",
        )
    return DEFAULT_TASK


def compose_config(
    task: str, choices: Mapping[str, Any], ignored_sections: Sequence[str] = (), *, has_network: bool = False
) -> Composition:
    """The configuration of a task: presets chosen by name, then single values over them. Sections of options that are
    `unread` have no part in what a short name means. A stage of alignment that starts from weights, of a checkpoint or
    of a network that is handed over, has a preset of its own for the optimizer."""
    kit = kit_of(task)
    preset = getattr(kit, "FINE_TUNING", None)
    fine_tuning = None if preset is None else FineTuning(optimizer=preset, has_network=has_network)
    return compose(task, choices, kit.OPTIONS, ignored_sections, fine_tuning)


def compose_eval_config(task: str, choices: Mapping[str, Any], ignored_sections: Sequence[str] = ()) -> Composition:
    """The same for an evaluation: it begins with the run's own options where the kit says which (`evaluation_options`),
    so that its figures are those of the run."""
    flat, checkpoint = dotted(choices), choices.get("checkpoint")
    config = recorded_config(checkpoint) if isinstance(checkpoint, (str, Path)) else None
    kit = kit_of(task)
    if config is None or not hasattr(kit, "evaluation_options") or recorded_task(checkpoint) != task:
        return compose_config(task, choices, ignored_sections)
    return compose_over(
        kit.evaluation_options(to_plain_dict(read_yaml(config)), flat), choices, kit.OPTIONS, ignored_sections
    )


@final
class Trainer:
    """Trains, evaluates and predicts. `model` is a preset, a folder, a Run or an nn.Module; `options` are nested or
    dotted: `{"trainer.max_steps": 100}`. `task` is a name, or a Task of your own, which brings model and data."""

    def __init__(
        self,
        task: str | Task,
        model: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        roles: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        output_dir: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        chosen = dict(options or {}) | ({} if output_dir is None else {"output_dir": str(output_dir)})
        self._task = task
        self._datasets = (train_dataset, eval_dataset)
        self._callbacks = list(callbacks)
        self._roles = dict(roles or {})
        self._run: Run | None = None
        self._loop: Loop | None = None
        self._network: nn.Module | None = None
        self._tokenizer: Any = None
        if isinstance(task, Task):
            _refuse_with_own_task([model, train_dataset, eval_dataset, tokenizer, roles])
            self.options: Any = from_dict(RunOptions, nested(chosen))
            self._model_name = type(task).__name__
            return
        _check_roles(self._roles, kit_of(task).ROLES)
        self._network, self._tokenizer, choices = _resolved(model, tokenizer)
        self._model_folder = model.folder if isinstance(model, Run) else None
        self._choices = choices | chosen
        composition = compose_config(task, self._choices, has_network=self._network is not None)
        self._model_name = composition.model_name if self._network is None else type(self._network).__name__
        self.options = kit_of(task).read_options(composition.values)

    def train(self, resume: str | Path | None = None) -> Run:
        """Train and return the run. `resume`: "auto" for the newest checkpoint of output_dir, or a folder."""
        options = self.options if resume is None else dataclasses.replace(self.options, resume=str(resume))
        if isinstance(self._task, Task):
            self._run = self._train_own(self._task, options)
        else:
            self._run = train_task(options, self._inputs())
        return self._run

    def fit(self, resume: str | Path | None = None) -> Run:
        """Train with an evaluation about ten times on the way."""
        if self.options.trainer.eval_every is None:
            steps = self.options.trainer.max_steps or 1000
            trainer = dataclasses.replace(self.options.trainer, eval_every=max(1, steps // 10))
            self.options = dataclasses.replace(self.options, trainer=trainer)
        return self.train(resume)

    def finetune(self, checkpoint: Any) -> Run:
        """Train from the weights of a run, a step or a Hugging Face folder; everything else starts afresh."""
        if isinstance(self._task, Task):
            raise ConfigError("a Task of your own builds its network itself", fix="load the weights in its build()")
        if self._network is not None:
            raise ConfigError("finetune() loads the checkpoint's own network", fix="leave model= out, or call train()")
        folder = checkpoint.folder if isinstance(checkpoint, Run) else _folder(checkpoint)
        self._model_name = folder.resolve().name
        given = {name: each for name, each in dotted(self._choices).items() if name.partition(".")[0] != "model"}
        values = compose_config(self._task, given | {"checkpoint": str(folder)}).values
        fresh, kept = kit_of(self._task).read_options(values), self.options
        # Started from weights, it may learn at another rate.
        rates = {name: getattr(fresh, name) for name in ("optimizer", "critic") if hasattr(fresh, name)}
        self.options = dataclasses.replace(kept, checkpoint=str(folder), model={}, **rates)
        return self.train()

    def evaluate(self) -> dict[str, float]:
        """The metrics of the evaluation set, of the trained run or of the model as it was given."""
        if isinstance(self._task, Task):
            with _process_group(self.options) as rendezvous:
                loop = self._own_loop(self._task, self.options, rendezvous)[0] if self._loop is None else self._loop
                return loop.evaluate()
        options = self.options
        if self._run is not None and options.task in RLHF_TASKS:
            # What it was trained beside is written down in its folder.
            options = dataclasses.replace(options, checkpoint=str(self._run.folder))
        return evaluate(options, self._inputs(self._run))

    def predict(self, inputs: Sequence[str]) -> list[dict[str, Any]]:
        """The task's answer to each input: for text_generation, `{"generated_text": ...}`."""
        if isinstance(self._task, Task):
            raise ConfigError(
                "how a Task of your own predicts is not known", fix="call the network: train().model(...)"
            )
        given = self._inputs(self._run)
        checkpoint = self.options.checkpoint
        if given.model is None and checkpoint is None:
            raise ModelError("there is nothing to predict with yet", fix="call train() first, or use pipeline()")
        network = load_model(checkpoint, self.options.device) if given.model is None else given.model
        tokenizer = load_tokenizer(checkpoint) if given.processor is None else given.processor
        opened = kit_of(self.options.task).open_pipeline(network, tokenizer, self.options)
        return [answer[0] for answer in opened([inputs] if isinstance(inputs, str) else list(inputs))]

    def _inputs(self, run: Run | None = None) -> Any:
        """What was handed over; the network and tokenizer of the run in their place, where there is one."""
        return kit_of(self.options.task).Inputs(
            train_dataset=self._datasets[0],
            eval_dataset=self._datasets[1],
            model=self._network if run is None else run.model,
            model_folder=self._model_folder if run is None else run.folder,
            initial_model=None if run is None else self._network,
            processor=self._tokenizer if run is None else run.processor,
            roles=self._roles,
            callbacks=self._callbacks,
            model_name=self._model_name,
        )

    def _own_loop(self, task: Task, options: RunOptions, rendezvous: Rendezvous) -> tuple[Loop, Path]:
        world = rendezvous.init_process_group().with_precision(options.precision)
        rendezvous.check_same({"configuration": to_yaml(to_dict(options))})
        folder = world.broadcast_object(default_folder(options, self._model_name))
        config = to_dict(options)
        return make_loop(task, options, folder, world=world, config=config, callbacks=self._callbacks), folder

    def _train_own(self, task: Task, options: RunOptions) -> Run:
        with _process_group(options) as rendezvous:
            loop, folder = self._own_loop(task, options, rendezvous)
            metrics = train(loop, options, folder, to_yaml(to_dict(options)))
        self._loop = loop
        return _run_of(loop, folder, None, metrics)


@contextmanager
def _process_group(options: RunOptions) -> Iterator[Rendezvous]:
    """The ranks of this process's runs, which stay joined until it ends, as a trained model may lie on all of them."""
    rendezvous = _joined_rendezvous(options.parallel, options.device, options.num_ranks)
    try:
        yield rendezvous
    except BaseException as error:
        _joined_rendezvous.cache_clear()
        rendezvous.__exit__(type(error), error, error.__traceback__)
        raise


@cache
def _joined_rendezvous(degrees: ParallelConfig, device: str, num_ranks: int) -> Rendezvous:
    rendezvous = Rendezvous.open(degrees, device, num_ranks)
    atexit.register(rendezvous.shutdown, failed=False)
    return rendezvous


def train_task(options: Any, inputs: Any) -> Run:
    """Train a task of a kit from its options and the objects handed over."""
    with _process_group(options) as rendezvous:
        inputs = _with_rlhf_loader(options, inputs)
        if rendezvous.rank >= options.parallel.world_size:
            served: Run = kit_of(options.task).serve_roles(options, inputs, rendezvous)
            return served
        assembly = kit_of(options.task).assemble(options, inputs, rendezvous)
        metrics = train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return _run_of(assembly.loop, assembly.folder, assembly.processor, metrics)


def _run_of(loop: Loop, folder: Path, tokenizer: Any, metrics: dict[str, float]) -> Run:
    return Run(
        folder=folder,
        model=loop.model,
        processor=tokenizer,
        metrics=metrics,
        was_interrupted=loop.was_interrupted,
    )


def evaluate(options: Any, inputs: Any) -> dict[str, float]:
    """The metrics of the evaluation set for a model in memory or under `options.checkpoint`."""
    with _process_group(options) as rendezvous:
        inputs = _with_rlhf_loader(options, inputs)
        metrics: dict[str, float] = kit_of(options.task).evaluate(options, inputs, rendezvous)
    return metrics


def _with_rlhf_loader(options: Any, inputs: Any) -> Any:
    """The inputs with what opens the network of a run of alignment, which lies beside a critic or as an adapter, and
    which its own kit alone can read; as they are for any other."""
    if options.task != DEFAULT_TASK or inputs.model is not None:
        return inputs
    if (task := recorded_task(options.checkpoint)) not in RLHF_TASKS:
        return inputs
    return dataclasses.replace(inputs, open_model=kit_of(task).open_model)


def pipeline(task: str, model: Any, tokenizer: Any = None, options: Mapping[str, Any] | None = None) -> Any:
    """What answers inputs of the task, from a run, a step or a Hugging Face folder, a Run, or a model in memory."""
    kit = kit_of(task)
    chosen = kit.read_options(compose_config(task, dict(options or {})).values)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(tokenizer)
    if tokenizer is None and isinstance(model, nn.Module):
        raise ConfigError("a model in memory comes without a tokenizer", fix="pass tokenizer= as well")
    found = load_tokenizer(model) if tokenizer is None else tokenizer
    return kit.open_pipeline(load_model(model, chosen.device), found, chosen)


def replay(folder: str | Path, step: int, changes: Mapping[str, Any] | None = None) -> Any:
    """Train a step of a run once more from the answers that it kept, with `changes` to its options if there are any;
    gives the figures `recorded` and `found`."""
    run_folder = _folder(folder)
    task = recorded_task(run_folder)
    if task not in RLHF_TASKS:
        raise ConfigError("only runs of alignment can be replayed", got=f"task={task}", fix="resume the run instead")
    kit = kit_of(task)
    for name in changes or {}:
        check_name(name, kit.OPTIONS)
    values = recorded_values(run_folder / "config.yaml", changes or {})
    return kit.replay(run_folder, step, kit.read_options(values))


def load_model(model: Any, device: str = "auto") -> nn.Module:
    """The network of a run folder, a step folder, a Hugging Face folder or a Run, in fp32; one in memory as it is."""
    if isinstance(model, (Run, nn.Module)):
        return model.model if isinstance(model, Run) else model
    folder = _folder(model)
    network: nn.Module = _kit_of_folder(folder).load(folder, devices.pick(device))
    return network.eval()


def load_tokenizer(model: Any) -> Any:
    """The tokenizer, or what else reads a task's inputs, that lies with a run, a step or a Hugging Face folder."""
    if isinstance(model, Run):
        return model.processor
    folder = _folder(model)
    return _kit_of_folder(folder).find_tokenizer(folder)


def save_model(model: Any, folder: str | Path, tokenizer: Any = None, dtype: str | None = None) -> None:
    """Write a network, or that of a Run or a folder, for other programs: a language model or a reward model as a
    Hugging Face folder, the items that a recommender finds as an index of faiss. Weights are written as `dtype`
    (float32, bfloat16 or float16), else as they were published, which is float32 for those trained from nothing. Of a
    model in a folder, one tensor at a time is in memory."""
    words = ", ".join(EXPORT_DTYPES)
    check(dtype is None or dtype in EXPORT_DTYPES, "dtype", dtype, f"one of {words}, or null")
    if tokenizer is None and not isinstance(model, nn.Module):
        tokenizer = load_tokenizer(model)
    source_folder = model.folder if isinstance(model, Run) else None if isinstance(model, nn.Module) else _folder(model)
    kit = _transformers() if source_folder is None else _kit_of_folder(source_folder)
    is_scored = isinstance(model, Run) and model.folder.is_dir() and recorded_task(model.folder) == "reward"
    if source_folder is not None and (is_scored or not isinstance(model, Run)) and hasattr(kit, "open_model"):
        opened = getattr(kit, "open_stored", kit.open_model)
        _transformers().export(opened(source_folder), Path(folder), tokenizer, dtype)
    else:
        getattr(kit, "save", _transformers().save)(load_model(model, "cpu"), Path(folder), tokenizer, dtype)


def _kit_of_folder(folder: Path) -> Any:
    """The kit of the task that is recorded in a run; a Hugging Face folder records none and holds a language model."""
    return kit_of(recorded_task(folder) or "text_generation")


def _check_roles(given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            fix = nearest(name, known) if known else "leave roles= out"
            raise ConfigError(f"this task has no role {name!r}", got=", ".join(given), fix=fix)


def _resolved(model: Any, tokenizer: Any) -> tuple[nn.Module | None, Any, dict[str, Any]]:
    """A network and a tokenizer in memory, and what the names of others stand for among the choices."""
    choices = {}
    if isinstance(tokenizer, (str, Path)):
        choices["tokenizer"], tokenizer = str(tokenizer), None
    if isinstance(model, Run):
        return model.model, tokenizer or model.processor, choices
    if isinstance(model, nn.Module):
        return model, tokenizer, choices
    if model is not None:
        choices["model"] = str(model)
    return None, tokenizer, choices


def _folder(model: Any) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if str(model) in presets("model"):
        raise ModelError(
            "a preset is an architecture without weights", got=str(model), expected="a run or a Hugging Face folder"
        )
    raise ModelError("there is no such folder", got=path, expected="a run, a step or a Hugging Face folder")


def _refuse_with_own_task(given: Sequence[Any]) -> None:
    if any(value is not None for value in given):
        raise ConfigError(
            "a Task of your own brings its model and its data", fix="give them to the task instead of to Trainer"
        )
