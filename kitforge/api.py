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
    shipped = {path.stem: path for path in sorted((CONFIGS / group).glob("*.yaml"))}
    own = {path.stem: path for path in sorted((OWN_CONFIGS / group).glob("*.yaml"))}
    for name in shipped.keys() & own.keys():
        raise ConfigError("a preset of your own has the name of a shipped one", got=own[name], fix="rename the file")
    return shipped | own


def preset_values(group: str = "model") -> dict[str, dict[str, Any]]:
    """The presets of a group as plain values."""
    return {name: plain(_read_yaml(path)) for name, path in presets(group).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The plain configuration of a task, and what its network is called: a preset, or the folder it comes from."""

    values: dict[str, Any]
    model_name: str


def composed(task: str, choices: Mapping[str, Any]) -> Composition:
    """Presets chosen by name, then single values over them. A choice is named `optimizer`, `optimizer.learning_rate`
    or, as a nested mapping, both. Raises ConfigError, which names the nearest thing for one that is not known."""
    named, single = _parted(choices)
    for name in single:
        check_name(name, kit_of(task).OPTIONS)
    checkpoint = single.get("checkpoint")
    _refuse_two_networks(checkpoint, named, single)
    # A prompt is text for the model: `${` means nothing in it.
    texts = {name: single.pop(name) for name in ("prompt",) if name in single}
    overrides = [f"task={task}", *(f"{group}={name}" for group, name in named.items()), *_search_path()]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("config", overrides, return_hydra_config=True)
        preset = config.hydra.runtime.choices.model
        with open_dict(config):
            del config["hydra"]
        values = plain(OmegaConf.merge(config, OmegaConf.create(nested(single), flags={"struct": False})))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("the configuration cannot be composed", got=_first_line(error)) from None
    if checkpoint is not None:
        values["model"] = {}
        preset = Path(checkpoint).resolve().name
    return Composition(values=values | texts, model_name=preset)


def check_name(name: str, options: type[Any]) -> None:
    """Raise ConfigError unless the dotted name is an option, or lies below a free-form one."""
    known = option_names(options)
    free = [option for option, hint in known.items() if typing.get_origin(hint) is dict]
    if name in known or name.startswith(tuple(f"{option}." for option in free)):
        return
    same = [option for option in known if option.split(".")[-1] == name.split(".")[-1]]
    close = same or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    below = [option for option in known if option.startswith(f"{name.split('.')[0]}.")]
    fix = f"did you mean {' or '.join(map(repr, close))}?" if close else nearest(name, below or groups())
    raise ConfigError(f"unknown option {name!r}", fix=fix)


def option_names(options: type[Any], path: str = "") -> dict[str, Any]:
    """The dotted names of all options with their types."""
    result: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(options).items():
        if dataclasses.is_dataclass(hint):
            result |= option_names(hint, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            result[path + name] = hint
    return result


def groups() -> list[str]:
    """The options that presets are chosen for by name."""
    return sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "task")


def plain(config: Any) -> dict[str, Any]:
    """A composed configuration as a plain dict. Raises ConfigError for `_target_` and for resolvers that would let a
    file reach the environment or run code."""
    _refuse_code(OmegaConf.to_container(config, resolve=False), "")
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        place = result
        *parents, last = name.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return result


def _parted(choices: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The presets by group, and single values by dotted name. A folder in a preset's place is the option it means."""
    named: dict[str, str] = {}
    single: dict[str, Any] = {}
    for name, value in _dotted(choices).items():
        if name not in groups() or not isinstance(value, str):
            # recipe=null is the recipe that changes nothing.
            single |= {} if name == "recipe" and value is None else {name: value}
        elif value in (known := presets(name)):
            named[name] = value
        elif name in FOLDERS and Path(value).expanduser().is_dir():
            single[FOLDERS[name]] = str(Path(value).expanduser())
        else:
            expected = "a preset or a folder" if name in FOLDERS else None
            raise ConfigError(f"unknown {name} {value!r}", expected=expected, fix=nearest(value, known))
    return named, single


def _dotted(choices: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in choices.items():
        inner = isinstance(value, Mapping) and value
        result |= _dotted(value, f"{path}{name}.") if inner else {f"{path}{name}": value}
    return result


def _refuse_two_networks(checkpoint: Any, named: Mapping[str, str], single: Mapping[str, Any]) -> None:
    described = [f"model={named['model']}"] if "model" in named else []
    described += [f"{name}={value}" for name, value in single.items() if name.startswith("model.")]
    if checkpoint is not None and described:
        raise ConfigError(
            "a checkpoint brings its own network", got=f"checkpoint={checkpoint} and {described[0]}", fix="keep one"
        )


def _search_path() -> list[str]:
    """The override that lets Hydra find presets in ./configs, once nothing there would have it read the environment."""
    for group in groups():
        for path in (OWN_CONFIGS / group).glob("*.yaml"):
            content = OmegaConf.to_container(_read_yaml(path), resolve=False)
            _refuse_code(content.get("defaults") if isinstance(content, dict) else None, f"{path} defaults")
    return [f"hydra.searchpath=['file://{OWN_CONFIGS.resolve()}']"] if OWN_CONFIGS.is_dir() else []


def _read_yaml(path: Path) -> Any:
    try:
        content = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not YAML that can be used", got=" ".join(str(error).split())) from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} does not hold options", got="a list", expected="name: value, a line each")
    return content


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _refuse_code(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if str(name).startswith("_target_"):
                raise ConfigError(
                    "configuration cannot name code to run", got=f"{path}_target_: {item}", fix="remove it"
                )
            _refuse_code(item, f"{path}{name}.")
            _refuse_code(name, path)
    elif isinstance(value, list):
        for item in value:
            _refuse_code(item, path)
    elif isinstance(value, str) and RESOLVER.search(value):
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
