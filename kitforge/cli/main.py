"""The command line: `kitforge VERB [option=value ...]`. Errors are printed without traceback."""

import os
import sys
from collections.abc import Sequence

from kitforge.cli.command import INTERRUPTED, Command, imported
from kitforge.cli.listing import version
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.log import console, errors, log_to_terminal, say
from kitforge.preset_files import RECIPE_SUFFIXES

COMMANDS = {
    "train": Command(
        purpose="train a model",
        example="kitforge train model=llama_tiny data.train=corpus.txt",
        compose="cli.train:compose_train",
        run="cli.train:train",
        has_ranks=True,
        has_folder=True,
    ),
    "finetune": Command(
        purpose="train from the weights of a checkpoint",
        example="kitforge finetune checkpoint=RUN data.train=FILE",
        compose="cli.train:compose_finetune",
        run="cli.train:train",
        has_ranks=True,
        has_folder=True,
    ),
    "evaluate": Command(
        purpose="metrics of a checkpoint",
        example="kitforge evaluate checkpoint=RUN data.eval=FILE",
        compose="cli.evaluate:compose_evaluate",
        run="cli.evaluate:evaluate",
        has_ranks=True,
    ),
    "generate": Command(
        purpose="complete a prompt, or a file of prompts",
        example='kitforge generate checkpoint=RUN prompt="ROMEO:"',
        compose="cli.generate:compose_generation",
        run="cli.generate:generate",
    ),
    "chat": Command(
        purpose="chat in the terminal",
        example="kitforge chat checkpoint=RUN",
        compose="cli.generate:compose_generation",
        run="cli.chat:chat",
    ),
    "predict": Command(
        purpose="score rows, or retrieve items for them",
        example="kitforge predict checkpoint=RUN data.eval=IN output=OUT",
        compose="cli.predict:compose_prediction",
        run="cli.predict:predict",
    ),
    "serve": Command(
        purpose="answer over HTTP",
        example="kitforge serve checkpoint=RUN port=8000",
        compose="cli.serve:compose_serve",
        run="cli.serve:serve",
    ),
    "export": Command(
        purpose="write a model for other programs",
        example="kitforge export checkpoint=RUN output_dir=FOLDER format=onnx",
        compose="composition:compose_config",
        run="cli.export:export",
    ),
    "config": Command(
        purpose="print the resolved configuration, run nothing",
        example="kitforge config task=sft model=llama_tiny",
        compose="composition:compose_config",
        run="cli.info:config",
    ),
    "report": Command(
        purpose="draw one run, or several side by side",
        example="kitforge report runs/latest",
        arguments=("RUN [RUN ...]  run folders; several are compared on one page",),
        run_plain="cli.info:report",
    ),
    "profile": Command(
        purpose="where the time of a run's steps went, by rank and cause",
        example="kitforge profile runs/latest",
        arguments=(
            "RUN               a run that was trained with trainer.profile=true",
            "output=FILE.html  the page, by default profile/times.html of the run",
            "partial=true      reads the ranks whose traces are there and whole",
        ),
        run_plain="cli.info:profile",
    ),
    "inspect": Command(
        purpose="columns and schema of a table, or loss mask of rows",
        example="kitforge inspect data.train=clicks.csv",
        arguments=(
            "TABLE or data.train=TABLE            describes the columns and infers a schema",
            "data.train=ROWS [checkpoint=FOLDER]  shows which tokens an RLHF task learns",
            "task=TASK                            recommendation for a table, else an RLHF task",
            "output=schema.yaml                   writes the schema, for data.schema",
        ),
        run_plain="cli.inspect:inspect",
    ),
    "demo": Command(
        purpose="all three kits in a few minutes, and one page on them",
        example="kitforge demo",
        run_plain="cli.demo:demo",
    ),
    "replay": Command(
        purpose="train a recorded RLHF step again, and compare",
        example="kitforge replay runs/latest step=3",
        arguments=(
            "RUN           a run folder with recorded rollouts",
            "step=N        the step to train again",
            "option=value  options to change, such as kl.coef=0.1",
        ),
        run_plain="cli.replay:replay",
    ),
    "models": Command(
        purpose="pretrained checkpoints by name",
        example="kitforge models fetch smollm2",
        arguments=("fetch NAME [NAME ...]  downloads them into the cache folder; without it they are listed",),
        run_plain="cli.models:models",
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
        run_plain="cli.verify:verify",
    ),
    "plan": Command(
        purpose="memory and time that a run needs, without its devices or data",
        example="kitforge plan model=llama3_8b cluster=h100 cluster.devices=8 parallel.shard=8 precision=bf16",
        arguments=(
            "option=value             a configuration that train takes",
            "cluster=NAME             the device of each rank: a100_80g, ascend_910b, b200, cpu, h100, ...",
            "cluster.devices=N        how many; what the degrees leave over goes to parallel.data",
            "cluster.memory_gb=N      of one device, for another kind",
            "cluster.reserve=SHARE    of it that is not for tensors, 0.06 by default",
            "cluster.price_per_hour=N of a device, with cluster.currency=EUR",
            "parallel=auto            the ten fastest layouts that fit; degrees beside it are kept",
            "output=FILE.html         the page: memory over a step, its passes, time by cause",
            "calibrate [ranks=N]      instead: measure this machine, and print its file of cluster=NAME",
        ),
        run_plain="cli.plan:plan",
    ),
    "list": Command(
        purpose="tasks, and presets with their sizes", example="kitforge list", run_plain="cli.listing:list_presets"
    ),
    "doctor": Command(
        purpose="devices, versions, extras, a one-second speed test",
        example="kitforge doctor",
        run_plain="cli.info:doctor",
    ),
}


def main() -> None:
    """Entry point of the console script."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--traceback"]
    if len(arguments) == len(sys.argv) - 1:
        sys.excepthook = lambda *error: imported("cli.console:print_error")(*error)
    log_to_terminal()
    # Only a launcher has several processes, of which one prints.
    is_main = "RANK" not in os.environ or imported("cli.console:is_main_process")()
    console.quiet = not is_main
    try:
        status = run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if is_main:
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
        lines = ["kitforge VERB [option=value ...] [-m] [--help] [--traceback]", ""]
        lines += [f"  {name:<9} {verb.purpose}" for name, verb in COMMANDS.items()]
        lines += [
            "",
            "kitforge VERB --help shows its arguments and an example.",
            "kitforge train FILE.yaml takes a configuration, as config.yaml of a run.",
            "kitforge train --help lists every option, of another task with task=NAME.",
        ]
        say("\n".join(lines))
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
        return int(imported(verb.run_plain)(rest))
    rest = _files_as_recipes(rest)
    flags = {argument for argument in rest if argument.startswith("-")}
    for flag in sorted(flags - {"-m", "--multirun", "-h", "--help"}):
        # As others write an option: `--name value` or `--name=value`.
        following = [each for each in rest[rest.index(flag) + 1 :][:1] if "=" not in flag + each]
        option = flag.lstrip("-") if "=" in flag else f"{flag.lstrip('-')}={''.join(following) or 'VALUE'}"
        fix = f"options are name=value: {option}"
        raise ConfigError(f"unknown flag {flag!r}", expected="-m, --config, --help, --traceback", fix=fix)
    overrides = [argument for argument in rest if not argument.startswith("-")]
    if flags & {"-h", "--help"}:
        imported("cli.options_help:print_options")(_usage(name), overrides)
        return 0
    found = imported("cli.sweep:sweep_runs")(verb, overrides, is_sweep=bool(flags & {"-m", "--multirun"}))
    return int(imported("cli.sweep:run_sweep")(name, verb, found))


def _files_as_recipes(arguments: Sequence[str]) -> list[str]:
    """`FILE.yaml`, `--config FILE` and `--config=FILE` as `recipe=FILE`."""
    found, words = list[str](), iter(arguments)
    for word in words:
        flag, _, value = word.partition("=")
        file = (value or next(words, "")) if flag == "--config" else word
        if flag == "--config" and not file:
            raise ConfigError("--config needs a file", fix="--config runs/latest/config.yaml")
        is_file = flag == "--config" or ("=" not in word and word.endswith(RECIPE_SUFFIXES))
        found.append(imported("cli.sweep:argument")("recipe", file) if is_file else word)
    return found


def _usage(name: str) -> list[str]:
    verb = COMMANDS[name]
    takes = "[option=value ...]" if verb.run_plain is None else "[ARGUMENT ...]" if verb.arguments else ""
    lines = [f"kitforge {name} {takes}".rstrip(), f"  {verb.purpose}", "", "Example:", f"  {verb.example}"]
    return [*lines, "", "Arguments:", *(f"  {line}" for line in verb.arguments)] if verb.arguments else lines
