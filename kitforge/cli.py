"""The command line: `kitforge VERB [option=value ...]`. Hydra composes; what is wrong is told in a person's words."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from kitforge.api import (
    CONFIGS,
    KITS,
    evaluate,
    kit_of,
    plain,
    preset_values,
    presets,
    save_model,
    search_path,
    train_task,
)
from kitforge.foundation import device as devices
from kitforge.foundation.config import to_yaml
from kitforge.foundation.errors import ConfigError, KitforgeError, nearest
from kitforge.foundation.log import console, errors
from kitforge.report.page import write_report

INTERRUPTED = 130


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    wants_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        sys.exit(run(arguments))
    except KitforgeError as error:
        if wants_traceback:
            raise
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if wants_traceback:
            raise
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command; returns the exit status."""
    verb, rest = (arguments[0], list(arguments[1:])) if arguments else ("--help", [])
    if verb in ("--help", "-h", "help"):
        _help()
        return 0
    if verb == "--version":
        console.print(importlib.metadata.version("kitforge"), highlight=False)
        return 0
    if verb in PLAIN_VERBS:
        return PLAIN_VERBS[verb](rest)
    if verb not in VERBS:
        raise ConfigError(f"unknown command {verb!r}", fix=nearest(verb, [*VERBS, *PLAIN_VERBS]))
    return _composed(VERBS[verb], rest)


def _composed(action: Callable[[dict[str, Any]], int], arguments: list[str]) -> int:
    """Let Hydra read the overrides (and sweep, with -m), then act on the plain configuration."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    overrides = [_checked(argument, arguments) for argument in arguments if not argument.startswith("-")]
    failures: list[KitforgeError] = []
    statuses: list[int] = []

    def job(config: DictConfig) -> None:
        try:
            statuses.append(action(plain(config)))
        except KitforgeError as error:
            # Hydra would dress it in its own report.
            failures.append(error)

    before = sys.argv
    sys.argv = [before[0], *flags, *overrides, *search_path(), "hydra/job_logging=none", "hydra/hydra_logging=none"]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(job)()
    finally:
        sys.argv = before
    if failures:
        raise failures[0]
    return max(statuses, default=0)


def _checked(override: str, arguments: Sequence[str]) -> str:
    """An override whose name is known, made so that Hydra accepts options that no YAML file mentions."""
    name, found, value = override.partition("=")
    name = name.lstrip("+~")
    if not found:
        raise ConfigError("this is not an option", got=override, expected="name=value")
    if (CONFIGS / name).is_dir() and name != "task":
        return _checked_preset(name, value)
    task = next((each.split("=", 1)[1] for each in arguments if each.startswith("task=")), "text_generation")
    if name == "task":
        kit_of(value)
        return override
    if not name.startswith(("hydra.", "hydra/")):
        _check_name(name, kit_of(task).OPTIONS)
        return f"++{name}={value}"
    return override


def _checked_preset(group: str, value: str) -> str:
    """`model=PRESET`, or `model=FOLDER` for the weights that lie there."""
    known = presets(group)
    for choice in value.split(","):
        if group == "model" and choice not in known and Path(choice).is_dir():
            return f"++checkpoint={choice}"
        if group == "tokenizer" and choice not in known and Path(choice).is_dir():
            return f"++tokenizer.name={choice}"
        if choice not in known:
            raise ConfigError(f"unknown {group} {choice!r}", fix=nearest(choice, known))
    return f"{group}={value}"


def _check_name(name: str, options: type[Any]) -> None:
    """Raise ConfigError unless the dotted name is a field of the options, or lies below a free-form one."""
    kind: Any = options
    for depth, part in enumerate(name.split(".")):
        fields = {field.name: field for field in dataclasses.fields(kind)}
        if part not in fields:
            known = [".".join([*name.split(".")[:depth], field]) for field in fields]
            raise ConfigError(f"unknown option {name!r}", fix=nearest(name, known))
        kind = typing.get_type_hints(kind)[part]
        if not dataclasses.is_dataclass(kind):
            return


def _train(values: dict[str, Any]) -> int:
    kit = kit_of(values["task"])
    result = train_task(kit.read_options(values), kit.Inputs(model_name=_model_name(values)))
    lines = [f"checkpoint  {result.folder / 'checkpoints'}", f"report      {result.folder / 'report.html'}"]
    lines += [f"{name:<11} {value:.4f}" for name, value in result.metrics.items()]
    console.print("\n".join(lines), markup=False, highlight=False)
    _show_sample(result.folder)
    if result.was_interrupted:
        console.print(f"interrupted; go on with the same command and output_dir={result.folder} resume=auto")
        return INTERRUPTED
    console.print(f'next: kitforge generate checkpoint={result.folder} prompt="..."', markup=False, highlight=False)
    return 0


def _finetune(values: dict[str, Any]) -> int:
    if values.get("checkpoint") is None:
        raise ConfigError("finetuning starts from weights", got="checkpoint=null", fix="add checkpoint=FOLDER")
    return _train(values)


def _evaluate(values: dict[str, Any]) -> int:
    options = kit_of(values["task"]).read_options(values)
    metrics = evaluate(options, kit_of(options.task).Inputs())
    console.print_json(json.dumps({name.removeprefix("eval/"): value for name, value in metrics.items()}), indent=None)
    return 0


def _generate(values: dict[str, Any]) -> int:
    options = kit_of(values["task"]).read_options(values)
    if options.checkpoint is None or options.prompt is None:
        raise ConfigError("generation needs a model and a prompt", fix='add checkpoint=RUN prompt="Once upon a time"')
    kit = kit_of(options.task)
    folder = Path(options.checkpoint)
    opened = kit.open_pipeline(kit.load(folder, devices.pick(options.device)), kit.find_tokenizer(folder), options)
    prompts = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    for answer in opened(prompts):
        sys.stdout.write(answer[0]["generated_text"] + "\n")
    return 0


def _export(values: dict[str, Any]) -> int:
    if values.get("checkpoint") is None or values.get("output_dir") is None:
        raise ConfigError("export needs a run and a folder", fix="add checkpoint=RUN output_dir=FOLDER")
    kit = kit_of(values["task"])
    source, target = Path(values["checkpoint"]), Path(values["output_dir"])
    save_model(kit.load(source, torch.device("cpu")), target, kit.find_tokenizer(source))
    console.print(f"wrote {target} for transformers", markup=False, highlight=False)
    return 0


def _config(values: dict[str, Any]) -> int:
    kit = kit_of(values["task"])
    sys.stdout.write(to_yaml(kit.resolved(kit.read_options(values))))
    return 0


def _report(arguments: list[str]) -> int:
    if not arguments:
        raise ConfigError("a report is of at least one run", fix="kitforge report runs/latest")
    target = write_report([Path(argument) for argument in arguments])
    console.print(f"wrote {target}", markup=False, highlight=False)
    return 0


def _list(_arguments: list[str]) -> int:
    table = Table(title="presets", title_justify="left")
    for column in ("task", "preset", "family", "parameters", "layers", "width", "length"):
        table.add_column(column, justify="left" if column in ("task", "preset", "family") else "right")
    for task in sorted(KITS):
        for row in kit_of(task).describe_presets(preset_values("model")):
            table.add_row(task, *row)
    console.print(table)
    return 0


def _doctor(_arguments: list[str]) -> int:
    table = Table(show_header=False)
    for name, value in _facts().items():
        table.add_row(name, value)
    console.print(table)
    return 0


def _facts() -> dict[str, str]:
    facts = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "devices": ", ".join(devices.available()),
        "bfloat16": "native" if devices.multiplies_natively(torch.bfloat16) else "stored only, computed in fp32",
    }
    for kind in devices.available():
        device = torch.device(kind)
        facts[kind] = f"{devices.describe(device)}, {_matrix_speed(device):.0f} GFLOP/s in fp32"
    for package in ("datasets", "sentencepiece", "tokenizers", "pyarrow", "numba", "wandb"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _matrix_speed(device: torch.device, seconds: float = 0.5) -> float:
    """GFLOP/s of fp32 products of 1024 x 1024 matrices."""
    size = 1024
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    torch.mm(left, right)
    devices.synchronize(device)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        torch.mm(left, right)
        devices.synchronize(device)
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - started) / 1e9


def _show_sample(folder: Path) -> None:
    """The newest sample of the run, if it has any."""
    pages = sorted((folder / "samples").glob("step_*.json"), key=lambda page: int(page.stem.split("_")[1]))
    if pages:
        sample = json.loads(pages[-1].read_text(encoding="utf-8"))["samples"][0]
        console.print(f"\n{sample['prompt']}", style="bold", markup=False, highlight=False, end="")
        console.print(f"{sample['text']}\n", markup=False, highlight=False)


def _model_name(values: dict[str, Any]) -> str:
    """What the run's folder is called after."""
    if values.get("checkpoint") is not None:
        return Path(values["checkpoint"]).resolve().name
    return str(values.get("model", {}).get("family", "model"))


def _help() -> None:
    lines = ["kitforge VERB [option=value ...] [-m] [--traceback]", ""]
    lines += [f"  {verb:<10}{words}" for verb, words in HELP.items()]
    lines += ["", "kitforge train --help lists presets and options; docs: README.md"]
    console.print("\n".join(lines), markup=False, highlight=False)


VERBS: dict[str, Callable[[dict[str, Any]], int]] = {
    "train": _train,
    "finetune": _finetune,
    "evaluate": _evaluate,
    "generate": _generate,
    "export": _export,
    "config": _config,
}
PLAIN_VERBS: dict[str, Callable[[list[str]], int]] = {"report": _report, "list": _list, "doctor": _doctor}
HELP = {
    "train": "train a model: kitforge train model=llama_tiny data.train=corpus.txt trainer.max_steps=300",
    "finetune": "train from weights: kitforge finetune checkpoint=FOLDER data.train=...",
    "evaluate": "loss and perplexity: kitforge evaluate checkpoint=RUN data.eval=FILE",
    "generate": 'continue a text: kitforge generate checkpoint=RUN prompt="ROMEO:"',
    "export": "write a Hugging Face folder: kitforge export checkpoint=RUN output_dir=FOLDER",
    "config": "print the resolved configuration, run nothing",
    "report": "draw one or more runs: kitforge report RUN [RUN ...]",
    "list": "tasks and presets with their sizes",
    "doctor": "this machine, its devices and packages, a one-second speed test",
}
