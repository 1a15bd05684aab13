"""Names become objects. Hydra ends here: below this file everything is built from dataclasses.

The kits are one dict; a kit is imported when a task of it is first asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch import nn

from kitforge.foundation import device as devices
from kitforge.foundation.config import from_dict, to_dict, to_yaml
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.run import Run, default_folder, make_loop, train
from kitforge.trainer.task import Task

CONFIGS = Path(__file__).parent / "configs"
OWN_CONFIGS = Path("configs")


@cache
def _transformers() -> Any:
    from kitforge.kits.transformers import build

    return build


KITS: dict[str, Callable[[], Any]] = {"text_generation": _transformers}


def kit_of(task: str) -> Any:
    """The kit that has the task; raises ConfigError naming the nearest one."""
    if task not in KITS:
        raise ConfigError(f"unknown task {task!r}", fix=nearest(task, KITS))
    return KITS[task]()


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
        if roles:
            raise ConfigError("this task has no roles", got=", ".join(roles), fix="leave roles= out")
        chosen = dict(options or {}) | ({} if output_dir is None else {"output_dir": str(output_dir)})
        self._task = task
        self._datasets = (train_dataset, eval_dataset)
        self._tokenizer = tokenizer
        self._callbacks = list(callbacks)
        self._run: Run | None = None
        if isinstance(task, Task):
            _refuse_with_own_task(model, train_dataset, eval_dataset)
            self._network: nn.Module | None = None
            self.options: Any = from_dict(RunOptions, nested(chosen))
            self._model_name = type(task).__name__
            return
        self._network, self._tokenizer, choice = _resolve_model(model, tokenizer)
        self._model_name = choice.get("model", Path(choice.get("checkpoint", "model")).name)
        self.options = kit_of(task).read_options(composed(task, choice | chosen))

    def train(self, resume: str | Path | None = None) -> Run:
        """Train and return the run. `resume`: "auto" for the newest checkpoint of output_dir, or a folder."""
        options = self.options if resume is None else dataclasses.replace(self.options, resume=str(resume))
        if isinstance(self._task, Task):
            return self._train_own(self._task, options)
        self._run = train_task(options, self._inputs())
        return self._run

    def fit(self, resume: str | Path | None = None) -> Run:
        """Train with an evaluation about ten times on the way."""
        if self.options.trainer.evaluate_every is None:
            steps = self.options.trainer.max_steps or 1000
            trainer = dataclasses.replace(self.options.trainer, evaluate_every=max(1, steps // 10))
            self.options = dataclasses.replace(self.options, trainer=trainer)
        return self.train(resume)

    def finetune(self, checkpoint: Any) -> Run:
        """Train from the weights of a run, a step or a Hugging Face folder; everything else starts afresh."""
        folder = checkpoint.folder if isinstance(checkpoint, Run) else Path(checkpoint)
        self.options = dataclasses.replace(self.options, checkpoint=str(folder))
        return self.train()

    def evaluate(self) -> dict[str, float]:
        """The metrics of the evaluation set, of the trained run or of the model as it was given."""
        if self._run is not None:
            inputs = dataclasses.replace(self._inputs(), model=self._run.model, tokenizer=self._run.tokenizer)
        else:
            inputs = self._inputs()
        return evaluate(self.options, inputs)

    def predict(self, inputs: Sequence[str]) -> list[dict[str, Any]]:
        """The task's answer to each input: for text_generation, `{"generated_text": ...}`."""
        if self._run is None:
            raise ModelError("there is nothing to predict with yet", fix="call train() first, or use pipeline()")
        opened = kit_of(self.options.task).open_pipeline(self._run.model, self._run.tokenizer, self.options)
        return [answer[0] for answer in opened(list(inputs))]

    def _inputs(self) -> Any:
        kit = kit_of(self.options.task)
        return kit.Inputs(
            train_dataset=self._datasets[0],
            eval_dataset=self._datasets[1],
            model=self._network,
            tokenizer=self._tokenizer,
            callbacks=self._callbacks,
            model_name=self._model_name,
        )

    def _train_own(self, task: Task, options: RunOptions) -> Run:
        folder = default_folder(options, self._model_name)
        config = to_dict(options)
        loop = make_loop(task, options, folder, config=config, callbacks=self._callbacks)
        metrics = train(loop, options, folder, to_yaml(config))
        self._run = _finished(loop, folder, None, metrics)
        return self._run


def train_task(options: Any, inputs: Any) -> Run:
    """Train a task of a kit from its options and the objects handed over."""
    assembly = kit_of(options.task).assemble(options, inputs)
    metrics = train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return _finished(assembly.loop, assembly.folder, assembly.tokenizer, metrics)


def _finished(loop: Loop, folder: Path, tokenizer: Any, metrics: dict[str, float]) -> Run:
    return Run(
        folder=folder,
        model=loop.model,
        tokenizer=tokenizer,
        metrics=metrics,
        was_interrupted=loop.was_interrupted,
    )


def evaluate(options: Any, inputs: Any) -> dict[str, float]:
    """The metrics of the evaluation set for a model in memory or under `options.checkpoint`."""
    metrics: dict[str, float] = kit_of(options.task).evaluate(options, inputs)
    return metrics


def pipeline(task: str, model: Any, tokenizer: Any = None, options: Mapping[str, Any] | None = None) -> Any:
    """What answers inputs of the task, from a run, a step or a Hugging Face folder, a Run, or a model in memory."""
    kit = kit_of(task)
    if isinstance(model, nn.Module):
        network, found = model, tokenizer
    else:
        network, found = load_model(model), tokenizer or load_tokenizer(model)
    if found is None:
        raise ConfigError("a model in memory comes without a tokenizer", fix="pass tokenizer= as well")
    return kit.open_pipeline(network, found, kit.read_options(composed(task, dict(options or {}))))


def load_model(model: Any, device: str = "auto") -> nn.Module:
    """The network of a run folder, a step folder, a Hugging Face folder or a Run, in fp32."""
    if isinstance(model, Run):
        return model.model
    network: nn.Module = _transformers().load(_folder(model), devices.pick(device))
    return network.eval()


def load_tokenizer(model: Any) -> Any:
    """The tokenizer that lies with a run folder, a step folder or a Hugging Face folder."""
    return model.tokenizer if isinstance(model, Run) else _transformers().find_tokenizer(_folder(model))


def save_model(model: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a network, or the network of a Run, as a Hugging Face folder."""
    network, found = (model.model, model.tokenizer) if isinstance(model, Run) else (model, tokenizer)
    _transformers().save(network, Path(folder), found)


def presets(group: str = "model") -> dict[str, Path]:
    """The YAML files of a group by name: the shipped ones and those of ./configs."""
    found = {path.stem: path for path in sorted((CONFIGS / group).glob("*.yaml"))}
    return found | {path.stem: path for path in sorted((OWN_CONFIGS / group).glob("*.yaml"))}


def preset_values(group: str = "model") -> dict[str, dict[str, Any]]:
    """The presets of a group as plain values."""
    return {name: plain(OmegaConf.load(path)) for name, path in presets(group).items()}


def composed(task: str, choices: Mapping[str, Any]) -> dict[str, Any]:
    """The plain configuration of a task: presets chosen by name, then single values over them."""
    values = nested(choices)
    groups = {name: value for name, value in values.items() if isinstance(value, str) and (CONFIGS / name).is_dir()}
    for group, name in groups.items():
        if name not in presets(group):
            raise ConfigError(f"unknown {group} {name!r}", fix=nearest(name, presets(group)))
        del values[group]
    overrides = [f"task={task}", *(f"{group}={name}" for group, name in groups.items() if group != "task")]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("config", [*overrides, *search_path()])
    return plain(OmegaConf.merge(config, OmegaConf.create(values, flags={"struct": False})))


def search_path() -> list[str]:
    """The override that lets Hydra find presets in ./configs."""
    return [f"hydra.searchpath=[file://{OWN_CONFIGS.resolve()}]"] if OWN_CONFIGS.is_dir() else []


def plain(config: Any) -> dict[str, Any]:
    """A composed configuration as a plain dict. Raises ConfigError for `_target_` and for resolvers that would let a
    file reach the environment or run code."""
    assert isinstance(config, DictConfig)
    raw = OmegaConf.to_container(config, resolve=False)
    _refuse_code(raw, "")
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` and `{"a": {"b": 1}}` alike as the latter."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        place = result
        *parents, last = name.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        if isinstance(value, Mapping) and isinstance(place.get(last), dict):
            place[last] |= nested(value)
        else:
            place[last] = nested(value) if isinstance(value, Mapping) else value
    return result


def _refuse_code(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "_target_":
                raise ConfigError(
                    "configuration cannot name code to run", got=f"{path}_target_: {item}", fix="remove it"
                )
            _refuse_code(item, f"{path}{name}.")
    elif isinstance(value, list):
        for item in value:
            _refuse_code(item, path)
    elif isinstance(value, str) and "${" in value and ":" in value.split("${", 1)[1].split("}", 1)[0]:
        raise ConfigError(
            "configuration cannot use resolvers", got=f"{path.rstrip('.')}: {value}", fix="write the value itself"
        )


def _resolve_model(model: Any, tokenizer: Any) -> tuple[nn.Module | None, Any, dict[str, Any]]:
    """A network in memory, a tokenizer, and what the name stands for among the options."""
    if isinstance(model, Run):
        return model.model, tokenizer or model.tokenizer, {}
    if isinstance(model, nn.Module):
        return model, tokenizer, {}
    if model is None:
        return None, tokenizer, {}
    if str(model) in presets("model"):
        return None, tokenizer, {"model": str(model)}
    if Path(model).is_dir():
        return None, tokenizer, {"checkpoint": str(model)}
    raise ConfigError(
        f"unknown model {str(model)!r}", expected="a preset or a folder", fix=nearest(str(model), presets())
    )


def _folder(model: Any) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    if str(model) in presets("model"):
        raise ModelError(
            "a preset is an architecture without weights", got=str(model), expected="a run or a Hugging Face folder"
        )
    raise ModelError("there is no such folder", got=path, expected="a run, a step or a Hugging Face folder")


def _refuse_with_own_task(model: Any, train_dataset: Any, eval_dataset: Any) -> None:
    if any(given is not None for given in (model, train_dataset, eval_dataset)):
        raise ConfigError(
            "a Task of your own brings its model and its data", fix="give them to the task instead of to Trainer"
        )
