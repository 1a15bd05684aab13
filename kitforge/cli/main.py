"""The command line: `kitforge VERB [option=value ...]`. Errors are printed without traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kitforge.cli.chat import chat
from kitforge.cli.command import INTERRUPTED, Command
from kitforge.cli.console import is_main_process, print_error, say
from kitforge.cli.demo import demo
from kitforge.cli.evaluate import compose_evaluate, evaluate
from kitforge.cli.export import export
from kitforge.cli.generate import compose_generation, generate
from kitforge.cli.info import config, doctor, list_presets, report, version
from kitforge.cli.inspect import inspect
from kitforge.cli.models import models
from kitforge.cli.predict import compose_prediction, predict
from kitforge.cli.replay import replay
from kitforge.cli.serve import compose_serve, serve
from kitforge.cli.sweep import run_sweep, sweep_runs
from kitforge.cli.train import compose_finetune, compose_train, train
from kitforge.cli.verify import verify
from kitforge.composition import compose_config, dotted, groups, parse, presets, task_of
from kitforge.core.parallel.config import UNBUILT_AXES
from kitforge.foundation.config import option_help
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.log import console, errors, log_to_terminal
from kitforge.kits.registry import kit_of
from kitforge.trainer.run_folder import default_folder

COMMANDS = {
    "train": Command(
        purpose="train a model",
        example="kitforge train model=llama_tiny data.train=corpus.txt",
        compose=compose_train,
        run=train,
        # One name for all ranks: it contains the time.
        rank_options=lambda run: {"output_dir": str(default_folder(run.options, run.model_name))},
    ),
    "finetune": Command(
        purpose="train from the weights of a checkpoint",
        example="kitforge finetune checkpoint=RUN data.train=FILE",
        compose=compose_finetune,
        run=train,
        # One name for all ranks: it contains the time.
        rank_options=lambda run: {"output_dir": str(default_folder(run.options, run.model_name))},
    ),
    "evaluate": Command(
        purpose="metrics of a checkpoint",
        example="kitforge evaluate checkpoint=RUN data.eval=FILE",
        compose=compose_evaluate,
        run=evaluate,
        rank_options=lambda _: {},
    ),
    "generate": Command(
        purpose="complete a prompt, or a file of prompts",
        example='kitforge generate checkpoint=RUN prompt="ROMEO:"',
        compose=compose_generation,
        run=generate,
    ),
    "chat": Command(
        purpose="chat in the terminal",
        example="kitforge chat checkpoint=RUN",
        compose=compose_generation,
        run=chat,
    ),
    "predict": Command(
        purpose="score rows, or retrieve items for them",
        example="kitforge predict checkpoint=RUN data.eval=IN output=OUT",
        compose=compose_prediction,
        run=predict,
    ),
    "serve": Command(
        purpose="answer over HTTP",
        example="kitforge serve checkpoint=RUN port=8000",
        compose=compose_serve,
        run=serve,
    ),
    "export": Command(
        purpose="write a model for other programs",
        example="kitforge export checkpoint=RUN output_dir=FOLDER format=onnx",
        compose=compose_config,
        run=export,
    ),
    "config": Command(
        purpose="print the resolved configuration, run nothing",
        example="kitforge config task=sft model=llama_tiny",
        compose=compose_config,
        run=config,
    ),
    "report": Command(
        purpose="draw one run, or several side by side",
        example="kitforge report runs/latest",
        arguments=("RUN [RUN ...]  run folders; several are compared on one page",),
        run_plain=report,
    ),
    "inspect": Command(
        purpose="columns and schema of a table, or loss mask of rows",
        example="kitforge inspect data.train=clicks.csv",
        arguments=(
            "TABLE or data.train=TABLE            describes the columns and infers a schema",
            "data.train=ROWS [checkpoint=FOLDER]  shows which tokens an RLHF task learns",
            "task=TASK                            recommendation for a table, else an RLHF task",
        ),
        run_plain=inspect,
    ),
    "demo": Command(
        purpose="all three kits in a few minutes, and one page on them",
        example="kitforge demo",
        run_plain=demo,
    ),
    "replay": Command(
        purpose="train a recorded RLHF step again, and compare",
        example="kitforge replay runs/latest step=3",
        arguments=(
            "RUN           a run folder with recorded rollouts",
            "step=N        the step to train again",
            "option=value  options to change, such as kl.coef=0.1",
        ),
        run_plain=replay,
    ),
    "models": Command(
        purpose="pretrained checkpoints by name",
        example="kitforge models fetch smollm2",
        arguments=("fetch NAME [NAME ...]  downloads them into the cache folder; without it they are listed",),
        run_plain=models,
    ),
    "verify": Command(
        purpose="the contracts, checked on this machine",
        example="kitforge verify",
        arguments=(
            "option=value              a configuration that train takes; without one, the tiny presets of all kits",
            "--only NAME[,NAME]        these contracts alone",
            "--timeout SECONDS         of each contract, after which it is broken; 300 by default",
            "--list                    the contracts",
            "--callable MODULE:OBJECT  a trainer of your own, see docs/verify.md",
        ),
        run_plain=verify,
    ),
    "list": Command(
        purpose="tasks, and presets with their sizes",
        example="kitforge list",
        run_plain=list_presets,
    ),
    "doctor": Command(
        purpose="devices, versions, extras, a one-second speed test",
        example="kitforge doctor",
        run_plain=doctor,
    ),
}


def main() -> None:
    """Entry point of the console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--traceback"]
    if len(arguments) == len(sys.argv) - 1:
        sys.excepthook = print_error
    log_to_terminal()
    if not is_main_process():
        console.quiet = True
    try:
        status = run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if is_main_process():
            errors.print("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); drop the buffered output.
        sys.stdout = None
        status = 0
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return the exit status. Raises KitforgeError."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("help", [])
    if name in ("--help", "-h", "help"):
        _help()
        return 0
    if name in ("--version", "-v", "-V"):
        say(version("kitforge"))
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}", fix=nearest(name, COMMANDS))
    verb = COMMANDS[name]
    if verb.run_plain is not None:
        if {"-h", "--help"} & set(rest):
            say("\n".join(_usage(name)))
            return 0
        return verb.run_plain(rest)
    flags = {argument for argument in rest if argument.startswith("-")}
    for flag in sorted(flags - {"-m", "--multirun", "-h", "--help"}):
        # As others write an option: `--name value` or `--name=value`.
        following = [each for each in rest[rest.index(flag) + 1 :][:1] if "=" not in flag + each]
        option = flag.lstrip("-") if "=" in flag else f"{flag.lstrip('-')}={''.join(following) or 'VALUE'}"
        fix = f"options are name=value: {option}"
        raise ConfigError(f"unknown flag {flag!r}", expected="-m, --help, --traceback", fix=fix)
    overrides = [argument for argument in rest if not argument.startswith("-")]
    if flags & {"-h", "--help"}:
        _help_options(name, overrides)
        return 0
    return run_sweep(name, verb, sweep_runs(verb, overrides, is_sweep=bool(flags & {"-m", "--multirun"})))


def _help() -> None:
    lines = ["kitforge VERB [option=value ...] [-m] [--help] [--traceback]", ""]
    lines += [f"  {name:<9} {verb.purpose}" for name, verb in COMMANDS.items()]
    lines += [
        "",
        "kitforge VERB --help shows its arguments and an example.",
        "kitforge train --help lists every option, of another task with task=NAME.",
    ]
    say("\n".join(lines))


def _usage(name: str) -> list[str]:
    """Lines of help of a verb: usage, purpose, arguments, example."""
    verb = COMMANDS[name]
    takes = "[option=value ...]" if verb.run_plain is None else "[ARGUMENT ...]" if verb.arguments else ""
    lines = [f"kitforge {name} {takes}".rstrip(), f"  {verb.purpose}", "", "Example:", f"  {verb.example}"]
    return [*lines, "", "Arguments:", *(f"  {line}" for line in verb.arguments)] if verb.arguments else lines


def _help_options(name: str, overrides: Sequence[str]) -> None:
    """Print every option of a task with its default and its help text (the comment at its field)."""
    task = task_of({option: values[0] for option, values in map(parse, overrides)})
    kit = kit_of(task)
    lines = [*_usage(name), ""]
    lines += ["Presets, one of each group (your own are found in ./configs/GROUP/NAME.yaml):"]
    lines += [f"  {group}={'|'.join(presets(group))}" for group in groups()]
    lines += ["", f"Several values with commas and -m run one after the other. Options of task={task}:"]
    words = option_help(kit.OPTIONS)
    for option, default in dotted(kit.resolved(kit.read_options(compose_config(task, {}).values))).items():
        if option.removeprefix("parallel.") in UNBUILT_AXES:
            continue
        shown = f"{option}={json.dumps(default)}".replace('"', "")
        lines.append(f"  {shown:<38} {words.get(option, '').replace('None:', 'null:')}".rstrip())
    say("\n".join(lines))
