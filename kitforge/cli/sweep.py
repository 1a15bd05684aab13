"""Composes the runs of a command or a sweep, and runs each in this process or in launched ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kitforge.cli.command import INTERRUPTED, Command, Invocation, imported
from kitforge.cli.console import print_error
from kitforge.composition import TEXT_OPTIONS, Composition, parse, task_of
from kitforge.core.parallel.launch import launch
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.foundation.log import console
from kitforge.kits.registry import kit_of
from kitforge.models.hub import resolve
from kitforge.preset_files import presets
from kitforge.trainer.run_folder import default_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A run of a command: what it was composed from, and the arguments that compose it again."""

    chosen: Composition
    arguments: tuple[str, ...]


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
        found.append(SweepRun(chosen=imported(verb.compose)(task, choices), arguments=tuple(arguments)))
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
    """Run all in order. In a sweep, a failed run is reported and the next one starts."""
    if len(found) == 1:
        return _run_or_launch(name, verb, found[0])
    worst = 0
    for number, member in enumerate(found, 1):
        console.print(f"{number} of {len(found)}", style="bold")
        try:
            status = _run_or_launch(name, verb, member)
        except KitforgeError as error:
            print_error(type(error), error, None)
            status = 1
        worst = max(worst, status)
        if status == INTERRUPTED:
            break
    return worst


def _run_or_launch(name: str, verb: Command, member: SweepRun) -> int:
    """Run in this process, or launch ranks if the options need several and no launcher started them."""
    assert verb.run is not None
    values, kit = member.chosen.values, kit_of(member.chosen.values["task"])
    options = kit.read_options(values)
    # A preset has no weights, which the verb says itself.
    if (weights := values.get("checkpoint")) is not None and weights not in presets():
        resolve(weights)
    chosen = Invocation(kit=kit, options=options, values=values, model_name=member.chosen.model_name)
    if not verb.has_ranks or launch_info() is not None or options.num_ranks == 1:
        return int(imported(verb.run)(chosen))
    kit.check_parallel(options)
    devices.of_rank(options.device, 0, options.num_ranks)
    # One name for all ranks: it contains the time.
    further = [argument("output_dir", str(default_folder(options, chosen.model_name)))] if verb.has_folder else []
    return launch([name, *member.arguments, *further], options.parallel, options.num_ranks)
