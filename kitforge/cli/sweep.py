"""Composes the runs of a command or a sweep, and runs each in this process or in launched ranks."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kitforge.cli.command import INTERRUPTED, Command, Invocation, imported
from kitforge.cli.console import is_main_process, print_error
from kitforge.composition import TEXT_OPTIONS, Composition, parse, task_of
from kitforge.core.parallel.launch import launch
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.foundation.log import console, say
from kitforge.kits.registry import kit_of
from kitforge.models.hub import resolve
from kitforge.report.metrics import read_run
from kitforge.report.page import write_report
from kitforge.report.panels import is_best
from kitforge.report.summary import best_evaluation
from kitforge.trainer.run_folder import claim, default_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A run of a command: what it was composed from, and the arguments that compose it again."""

    chosen: Composition
    arguments: tuple[str, ...]
    words: str = ""  # the options in which it differs from the others


def sweep_runs(verb: Command, overrides: Sequence[str], *, is_sweep: bool = False) -> list[SweepRun]:
    """What a verb is to run, composed and named as a whole before the first of it begins."""
    assert verb.compose is not None
    axes = [(text, *parse(text)) for text in overrides]
    for _, name, values in axes:
        if len(values) > 1 and not is_sweep:
            raise ConfigError(
                f"option {name!r} has several values",
                got=", ".join(map(str, values)),
                fix=f"-m runs one after the other; {name}=[...] is a list; {name}=\"'...'\" is text with a comma",
            )
    found = []
    for picked in itertools.product(*(values for _, _, values in axes)):
        choices = {name: value for (_, name, _), value in zip(axes, picked, strict=True)}
        # A value of many is written out anew; a single one stays as it was typed.
        arguments = [
            text if len(values) == 1 else argument(name, value)
            for (text, name, values), value in zip(axes, picked, strict=True)
        ]
        task = task_of(choices)
        choices.pop("task", None)
        words = " ".join(each for each, (_, _, values) in zip(arguments, axes, strict=True) if len(values) > 1)
        if verb.has_folder and choices.get("parallel") == "auto":
            # Ranks that this process launches are given the layout; to those of another launcher rank 0 tells it.
            choices, replaced = imported("cli.auto:found_layout")(imported(verb.compose), task, choices)
            arguments = [each for each in arguments if parse(each)[0] not in replaced]
            arguments += [argument(name, choices[name]) for name in replaced if name in choices]
        chosen = imported(verb.compose)(task, choices)
        found.append(SweepRun(chosen=chosen, arguments=tuple(arguments), words=words))
    folders = [folder for member in found if (folder := member.chosen.values.get("output_dir")) is not None]
    if len(folders) != len(set(folders)):
        raise ConfigError(
            "each run of a sweep needs its own folder", got=f"output_dir={folders[0]}", fix="leave output_dir out"
        )
    return found


def argument(name: str, value: object) -> str:
    """The argument NAME=VALUE that `parse` reads as that value."""
    if not isinstance(value, str) or name in TEXT_OPTIONS:
        return f"{name}={value if isinstance(value, str) else json.dumps(value)}"
    # Within quotes, a backslash escapes only a quote.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"{name}='{quoted}'"


def run_sweep(name: str, verb: Command, found: Sequence[SweepRun]) -> int:
    """Run all in order. In a sweep, a failed run is reported and the next one starts; the runs are compared in the
    end."""
    if len(found) == 1:
        return _run_or_launch(name, verb, found[0], _invocation(found[0]))
    worst, done = 0, dict[str, Path]()
    for number, member in enumerate(found, 1):
        console.print(f"{number} of {len(found)}: {member.words}", style="bold", markup=False, highlight=False)
        try:
            chosen = _invocation(member)
            with _run_folder(verb, chosen) as folder:
                if folder is not None:
                    chosen = replace(chosen, options=replace(chosen.options, output_dir=folder))
                status = _run_or_launch(name, verb, member, chosen)
            done |= {} if folder is None or status or not Path(folder).is_dir() else {member.words: Path(folder)}
        except KitforgeError as error:
            print_error(type(error), error, None)
            status = 1
        worst = max(worst, status)
        if status == INTERRUPTED:
            break
    if len(done) > 1 and is_main_process():
        _compare(done)
    return worst


def _compare(done: Mapping[str, Path]) -> None:
    """Print the best evaluation of each run, mark the best of all, and write a page that compares them."""
    figures = [best_evaluation(read_run(folder)) for folder in done.values()]
    width = max(map(len, done))
    for words, figure in zip(done, figures, strict=True):
        result = "no evaluation" if figure is None else f"{figure.label.lower()} {figure.text} {figure.detail}"
        say(f"{words:<{width}}  {result}{'  <- best' if is_best(figure, figures) else ''}")
    say(f"comparison  {write_report(list(done.values()))}")


def _invocation(member: SweepRun) -> Invocation:
    values, kit = member.chosen.values, kit_of(member.chosen.values["task"])
    return Invocation(kit=kit, options=kit.read_options(values), values=values, model_name=member.chosen.model_name)


def _run_or_launch(name: str, verb: Command, member: SweepRun, chosen: Invocation) -> int:
    """Run in this process, or launch ranks if the options need several and no launcher started them."""
    assert verb.run is not None
    kit, options = chosen.kit, chosen.options
    if (weights := chosen.values.get("checkpoint")) is not None:
        resolve(weights)
    if not verb.has_ranks or launch_info() is not None or options.num_ranks == 1:
        return int(imported(verb.run)(chosen))
    kit.check_parallel(options)
    devices.of_rank(options.device, 0, options.num_ranks)
    # One name for all ranks: it contains the time.
    with _run_folder(verb, chosen) as folder:
        further = [] if folder is None else [argument("output_dir", folder)]
        return launch([name, *member.arguments, *further], options.parallel, options.num_ranks)


@contextmanager
def _run_folder(verb: Command, chosen: Invocation) -> Iterator[str | None]:
    """The folder of a run, made for it unless several ranks do so."""
    if not verb.has_folder:
        yield None
        return
    folder = default_folder(chosen.options, chosen.model_name, is_claimed=launch_info() is None)
    with claim(chosen.options, folder):
        yield str(folder)
