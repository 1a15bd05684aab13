"""`kitforge verify`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kitforge.cli.console import say
from kitforge.composition import parse
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, sanitize
from kitforge.report.page import write_report
from kitforge.verify.case import Case
from kitforge.verify.catalog import CONTRACTS
from kitforge.verify.contract import Contract, Verdict, Verdicts
from kitforge.verify.distribution import import_sharding
from kitforge.verify.runner import chosen, run_contracts, summary, write_verdicts

# The tiny presets of the three kits.
DEFAULTS: tuple[Mapping[str, Any], ...] = (
    {"task": "text_generation", "model": "llama_tiny"},
    {"task": "recommendation", "model": "wide_deep"},
    {"task": "sft", "model": "llama_tiny"},
    {"task": "grpo", "model": "llama_tiny"},
)
FLAGS = ("--only", "--callable")


def verify(arguments: list[str]) -> int:
    """Check the contracts on a configuration, or on the defaults. Returns 1 if one is broken."""
    if arguments == ["--list"]:
        width = max(len(contract.name) for contract in CONTRACTS)
        say("\n".join(f"{contract.name:<{width}}  {contract.promise}" for contract in CONTRACTS))
        return 0
    flags, options = _split(arguments)
    contracts = chosen(CONTRACTS, flags["--only"])
    output = options.pop("output_dir", None)
    folder = Path(str(output)) if output is not None else Path(f"runs/{time.strftime('%Y%m%d-%H%M%S')}-verify")
    # Forks of a process with threads could wait for these for ever.
    torch.set_num_threads(1)
    if folder.exists():
        raise ConfigError("contracts are checked in a folder of their own", got=f"{folder}, which exists")
    cases = [Case.of(choices, folder / str(choices["task"])) for choices in ([options] if options else DEFAULTS)]
    if any(contract.name in ("ranks", "layouts") for contract in contracts):
        import_sharding()
    verdicts = list[Verdict]()
    for number, case in enumerate(cases):
        own = [contract for contract in contracts if number == 0 or not contract.is_of_device]
        verdicts += _check_case(case, own)
    sys.stdout.write(json.dumps(summary(verdicts)) + "\n")
    return int(any(verdict.status == "broken" for verdict in verdicts))


def _split(arguments: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """The values of the flags, and the options. Raises ConfigError."""
    flags = {flag: list[str]() for flag in FLAGS}
    options: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        flag, _, value = word.partition("=")
        if flag in FLAGS:
            value = value or next(words, "")
            if not value:
                raise ConfigError(f"{flag} needs a value", fix="kitforge verify --list shows the contracts")
            flags[flag] += value.split(",")
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag {word!r}", expected="--list, --only NAME, --callable MODULE:OBJECT")
        else:
            name, values = parse(word)
            if len(values) > 1:
                raise ConfigError(f"option {name!r} has several values", got=word, fix=f"{name}=[...] is a list")
            options[name] = values[0]
    return flags, options


def _check_case(case: Case, contracts: Sequence[Contract[Case]]) -> Verdicts:
    """Train the undisturbed run in this process, whose forks then find compiled kernels; then check the contracts."""
    say(f"{case.name}  {case.folder}")
    say(f"  reduced: {' '.join(case.reduced)}")
    begun = time.perf_counter()
    console.quiet = True
    try:
        case.train("base", {})
    finally:
        console.quiet = False
    say(f"  trained {time.perf_counter() - begun:.1f} s")
    yield from _shown(run_contracts(contracts, case, case.name, case.folder / "verify.log", started=_progress), case)


def _shown(verdicts: Verdicts, case: Case) -> Verdicts:
    done = []
    for verdict in verdicts:
        say(line(verdict))
        done.append(verdict)
        yield verdict
    write_verdicts(case.base, done)
    write_report([case.base])


def _progress(promise: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r  checking {promise} ...\033[K\r")
        sys.stderr.flush()


def line(verdict: Verdict) -> str:
    """A verdict in one line; a longer error below it."""
    promise = next((each.promise for each in CONTRACTS if each.name == verdict.contract), verdict.contract)
    figure = "" if verdict.figure is None else f"{verdict.figure:.3g} of {verdict.bound:.0e}, "
    first, *further = sanitize(verdict.words).splitlines() or [""]
    lines = [f"  {verdict.status:<11}  {promise:<42}  {figure}{first}  {verdict.seconds:.1f} s"]
    return "\n".join([*lines, *(f"               {each}" for each in further)])
