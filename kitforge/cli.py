"""The command line: `kitforge VERB [option=value ...]`. What is wrong is told in a person's words."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from kitforge.api import KITS, composed, evaluate, kit_of, load_model, load_tokenizer, save_model, train_task
from kitforge.composition import TEXTS, Composition, dotted, groups, option_words, parse, preset_values, presets
from kitforge.core.checkpoint.layout import steps
from kitforge.core.parallel.failure import explain, report
from kitforge.core.parallel.launch import launch
from kitforge.core.parallel.lobby import place
from kitforge.foundation import device as devices
from kitforge.foundation.config import to_yaml
from kitforge.foundation.errors import ConfigError, KitforgeError, nearest
from kitforge.foundation.log import console, errors
from kitforge.report.metrics import RunRecord, read_run
from kitforge.report.page import write_report
from kitforge.trainer.run import default_folder

INTERRUPTED = 130
DEFAULT_TASK = "text_generation"
# What several ranks can do together.
LAUNCHED_VERBS = ("train", "finetune", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run of a command: what it was composed from, and the arguments that compose it again."""

    chosen: Composition
    arguments: tuple[str, ...]


def main() -> None:
    """The console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--traceback"]
    if len(arguments) == len(sys.argv) - 1:
        sys.excepthook = _tell
    if not _speaks():
        console.quiet = True
    try:
        status = run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if _speaks():
            errors.print("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has closed the pipe, as `| head` does; what is still buffered has no reader either.
        sys.stdout = None
        status = 0
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command; returns the exit status. Raises KitforgeError."""
    verb, rest = (arguments[0], list(arguments[1:])) if arguments else ("help", [])
    if verb in ("--help", "-h", "help"):
        _help()
        return 0
    if verb == "--version":
        _say(_version("kitforge"))
        return 0
    if verb in PLAIN_VERBS:
        return PLAIN_VERBS[verb](rest)
    if verb not in VERBS:
        raise ConfigError(f"unknown command {verb!r}", fix=nearest(verb, HELP))
    flags = {argument for argument in rest if argument.startswith("-")}
    for flag in flags - {"-m", "--multirun", "-h", "--help"}:
        raise ConfigError(f"unknown flag {flag!r}", expected="-m, --help, --traceback", fix="options are name=value")
    overrides = [argument for argument in rest if not argument.startswith("-")]
    if flags & {"-h", "--help"}:
        _help_options(verb)
        return 0
    return _run_members(verb, _members(overrides, is_sweep=bool(flags & {"-m", "--multirun"})))


def _tell(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """What reaches a person in the place of a traceback; a rank that was started by another process tells that one."""
    error = explain(error) or error
    words = _words(error)
    if report(error, words):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ and "WORLD_SIZE" in os.environ else ""
        errors.print(f"[bold red]error:[/] {rank}{escape(words)}", highlight=False, soft_wrap=True)


def _words(error: BaseException) -> str:
    if isinstance(error, KitforgeError):
        return str(error)
    if isinstance(error, OSError):
        words = f"{error.filename or 'this machine'}: {error.strerror or error}"
        if error.errno == errno.ENOSPC:
            words += "\n  do:       free some space, then go on with resume=auto"
        return words
    return f"{type(error).__name__}: {error}\n  do:       this is a mistake in Kitforge; --traceback shows where"


def _members(overrides: Sequence[str], *, is_sweep: bool) -> list[Member]:
    """What is to be run, composed and named as a whole before the first of it begins."""
    axes = [(text, *parse(text)) for text in overrides]
    for _, name, values in axes:
        if len(values) > 1 and not is_sweep:
            raise ConfigError(
                f"option {name!r} has several values",
                got=", ".join(map(str, values)),
                fix=f"-m runs one after the other; {name}=[...] is a list; {name}=\"'...'\" is text with a comma",
            )
    members = []
    for picked in itertools.product(*(values for _, _, values in axes)):
        choices = {name: value for (_, name, _), value in zip(axes, picked, strict=True)}
        # A value of many is written out anew; a single one stays as it was typed.
        arguments = [
            text if len(values) == 1 else _argument(name, value)
            for (text, name, values), value in zip(axes, picked, strict=True)
        ]
        chosen = composed(str(choices.pop("task", DEFAULT_TASK)), choices)
        members.append(Member(chosen=chosen, arguments=tuple(arguments)))
    folders = [folder for member in members if (folder := member.chosen.values.get("output_dir")) is not None]
    if len(folders) != len(set(folders)):
        raise ConfigError(
            "the runs of a sweep need a folder each", got=f"output_dir={folders[0]}", fix="leave output_dir out"
        )
    return members


def _argument(name: str, value: Any) -> str:
    """The argument that `parse` reads as that value."""
    if not isinstance(value, str) or name in TEXTS:
        return f"{name}={value if isinstance(value, str) else json.dumps(value)}"
    # Within quotes, a backslash counts only before one.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"{name}='{quoted}'"


def _run_members(verb: str, members: Sequence[Member]) -> int:
    """Run one after the other; in a sweep one that fails is told, and the next one is run."""
    if len(members) == 1:
        return _carry_out(verb, members[0])
    worst = 0
    for number, member in enumerate(members, 1):
        console.print(f"{number} of {len(members)}", style="bold")
        try:
            status = _carry_out(verb, member)
        except KitforgeError as error:
            _tell(type(error), error, None)
            status = 1
        worst = max(worst, status)
        if status == INTERRUPTED:
            break
    return worst


def _carry_out(verb: str, member: Member) -> int:
    """In this process; in ranks of its own where the degrees ask for several and no launcher has started any."""
    if verb == "finetune" and member.chosen.values.get("checkpoint") is None:
        raise ConfigError("finetuning starts from weights", got="checkpoint=null", fix="add checkpoint=FOLDER")
    if verb not in LAUNCHED_VERBS or place() is not None:
        return VERBS[verb](member.chosen)
    kit = kit_of(member.chosen.values["task"])
    options = kit.read_options(member.chosen.values)
    if options.parallel.world == 1:
        return VERBS[verb](member.chosen)
    kit.check_degrees(options)
    devices.of_rank(options.device, 0, options.parallel.world)
    arguments = [verb, *member.arguments]
    if verb != "evaluate":
        # Decided once, as every rank has a clock of its own.
        arguments.append(_argument("output_dir", str(default_folder(options, member.chosen.model_name))))
    return launch(arguments, options.parallel)


def _train(chosen: Composition) -> int:
    kit = kit_of(chosen.values["task"])
    options = _restarted(kit.read_options(chosen.values))
    result = train_task(options, kit.Inputs(model_name=chosen.model_name))
    if not _speaks():
        return INTERRUPTED if result.was_interrupted else 0
    record = read_run(result.folder)
    _show_sample(record)
    lines = [f"{name:<15}  {value:.4f}" for name, value in result.metrics.items()]
    losses = record.eval.get("eval/loss")
    if losses is not None and losses.steps[0] == 0:
        lines.append(f"before training  {losses.values[0]:.4f}  (eval/loss)")
    lines += [f"checkpoint       {result.folder / 'checkpoints'}", f"report           {result.folder / 'report.html'}"]
    _say("\n".join(lines))
    if result.was_interrupted:
        _say(f"interrupted; go on with the same command and output_dir={result.folder} resume=auto")
        return INTERRUPTED
    _say(f'try next:\n  kitforge generate checkpoint={result.folder} prompt="Once upon a time"')
    _say(f"  kitforge evaluate checkpoint={result.folder} data.eval=FILE\n  kitforge train data.train=FILE")
    return 0


def _restarted(options: Any) -> Any:
    """In ranks that were started again, the options that go on from what the run has saved, if it has got so far."""
    where = place()
    if where is None or where.restarts == 0 or options.output_dir is None:
        return options
    has_saved = bool(steps(Path(options.output_dir) / "checkpoints"))
    return dataclasses.replace(options, resume="auto") if has_saved else options


def _speaks() -> bool:
    """Whether this process talks to people: alone, or as the first of several ranks."""
    where = place()
    return where is None or where.rank == 0


def _evaluate(chosen: Composition) -> int:
    options = kit_of(chosen.values["task"]).read_options(chosen.values)
    metrics = evaluate(options, kit_of(options.task).Inputs())
    # JSON has no word for infinity and none for what is not a number.
    line = {name.removeprefix("eval/"): value if math.isfinite(value) else None for name, value in metrics.items()}
    sys.stdout.write(json.dumps(line) + "\n" if _speaks() else "")
    return 0


def _generate(chosen: Composition) -> int:
    options = kit_of(chosen.values["task"]).read_options(chosen.values)
    if options.checkpoint is None or options.prompt is None:
        raise ConfigError("generation needs a model and a prompt", fix='add checkpoint=RUN prompt="Once upon a time"')
    model = load_model(options.checkpoint, options.device)
    opened = kit_of(options.task).open_pipeline(model, load_tokenizer(options.checkpoint), options)
    prompts = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    for answer in opened(prompts):
        text = answer[0]["generated_text"]
        sys.stdout.write((_shown(text) if sys.stdout.isatty() else text) + "\n")
    return 0


def _export(chosen: Composition) -> int:
    source, target = chosen.values.get("checkpoint"), chosen.values.get("output_dir")
    if source is None or target is None:
        raise ConfigError("export needs a run and a folder", fix="add checkpoint=RUN output_dir=FOLDER")
    save_model(load_model(source, "cpu"), target, load_tokenizer(source))
    _say(f"wrote {target} for transformers")
    return 0


def _config(chosen: Composition) -> int:
    kit = kit_of(chosen.values["task"])
    sys.stdout.write(to_yaml(kit.resolved(kit.read_options(chosen.values))))
    return 0


def _report(arguments: list[str]) -> int:
    if not arguments:
        raise ConfigError("a report is of at least one run", fix="kitforge report runs/latest")
    target = write_report([Path(argument) for argument in arguments])
    _say(f"wrote {target}")
    return 0


def _list(arguments: list[str]) -> int:
    _refuse_arguments("list", arguments)
    for task in sorted(KITS):
        table = Table(title=f"task {task}", title_justify="left", title_style="bold")
        for column in ("model", "family", "parameters", "layers", "width", "length"):
            table.add_column(column, justify="left" if column in ("model", "family") else "right")
        for row in kit_of(task).describe_presets(preset_values("model")):
            table.add_row(*row)
        console.print(table)
    for group in groups():
        if group != "model":
            _say(f"{group:<10} {', '.join(presets(group))}")
    return 0


def _doctor(arguments: list[str]) -> int:
    _refuse_arguments("doctor", arguments)
    table = Table(show_header=False)
    for name, value in _facts().items():
        table.add_row(name, value)
    console.print(table)
    return 0


def _facts() -> dict[str, str]:
    facts = {
        "kitforge": _version("kitforge"),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "devices": ", ".join(devices.available()),
        "bfloat16": "native" if devices.multiplies_natively(torch.bfloat16) else "stored only, computed in fp32",
    }
    for kind in devices.available():
        device = torch.device(kind)
        facts[kind] = f"{devices.describe(device)}, {_matrix_speed(device):.0f} GFLOP/s in fp32"
    packages = ("datasets", "sentencepiece", "tokenizers", "pyarrow", "numba", "wandb")
    return facts | {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


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


def _show_sample(record: RunRecord) -> None:
    """A sample of the newest evaluation, if there is one; the record has the newest first."""
    for sample in record.samples[0].samples[:1] if record.samples else ():
        console.print(f"\n{_shown(sample.prompt)}", style="bold", markup=False, highlight=False, end="")
        console.print(f"{_shown(sample.text)}\n", markup=False, highlight=False)


def _shown(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


def _say(text: str) -> None:
    """A message as it stands: no colours, nothing read as markup, lines as long as they are."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _refuse_arguments(verb: str, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"kitforge {verb} takes no options", got=" ".join(arguments))


def _help() -> None:
    lines = ["kitforge VERB [option=value ...] [-m] [--help] [--traceback]", ""]
    lines += [f"  {verb:<9} {words}" for verb, words in HELP.items()]
    lines += ["", "kitforge train --help lists every option."]
    _say("\n".join(lines))


def _help_options(verb: str) -> None:
    """Every option with its default, and what the comment beside its field says of it."""
    kit = kit_of(DEFAULT_TASK)
    lines = [f"kitforge {verb} [option=value ...]", f"  {HELP[verb]}", ""]
    lines += ["Presets, one of each group (your own are found in ./configs/GROUP/NAME.yaml):"]
    lines += [f"  {group}={'|'.join(presets(group))}" for group in groups()]
    lines += ["", "Several values with commas and -m run one after the other. Options:"]
    words = option_words(kit.OPTIONS)
    for name, default in dotted(kit.resolved(kit.read_options(composed(DEFAULT_TASK, {}).values))).items():
        given = f"{name}={json.dumps(default)}".replace('"', "")
        lines.append(f"  {given:<38} {words.get(name, '').replace('None:', 'null:')}".rstrip())
    _say("\n".join(lines))


VERBS: dict[str, Callable[[Composition], int]] = {
    "train": _train,
    "finetune": _train,
    "evaluate": _evaluate,
    "generate": _generate,
    "export": _export,
    "config": _config,
}
PLAIN_VERBS: dict[str, Callable[[list[str]], int]] = {"report": _report, "list": _list, "doctor": _doctor}
HELP = {
    "train": "train: kitforge train model=llama_tiny data.train=corpus.txt",
    "finetune": "from weights: kitforge finetune checkpoint=FOLDER data.train=FILE",
    "evaluate": "loss and perplexity: kitforge evaluate checkpoint=RUN data.eval=FILE",
    "generate": 'continue a text: kitforge generate checkpoint=RUN prompt="ROMEO:"',
    "export": "for transformers: kitforge export checkpoint=RUN output_dir=FOLDER",
    "config": "print the resolved configuration, run nothing",
    "report": "draw one or more runs: kitforge report RUN [RUN ...]",
    "list": "tasks and presets with their sizes",
    "doctor": "this machine: devices, packages, a one-second speed test",
}
