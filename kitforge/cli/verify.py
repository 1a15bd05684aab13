"""`kitforge verify`."""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kitforge.composition import parse
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, sanitize, say
from kitforge.report.page import write_report
from kitforge.verify import own_trainer
from kitforge.verify.case import Case
from kitforge.verify.catalog import CONTRACTS
from kitforge.verify.contract import Contract, SubjectT, Verdict
from kitforge.verify.distribution import import_sharding
from kitforge.verify.runner import TIMEOUT, chosen, run_contracts, summary, write_verdicts

# The tiny presets of the three kits.
DEFAULTS: tuple[Mapping[str, Any], ...] = (
    {"task": "text_generation", "model": "llama_tiny"},
    {"task": "recommendation", "model": "wide_deep"},
    {"task": "sft", "model": "llama_tiny"},
    {"task": "grpo", "model": "llama_tiny"},
)
FLAGS = ("--only", "--callable", "--timeout")


def verify(arguments: list[str]) -> int:
    """Check the contracts on a configuration, on the defaults, or on a trainer of the caller's. Returns 1 if one is
    broken."""
    if arguments == ["--list"]:
        width = max(len(contract.name) for contract in CONTRACTS)
        say("\n".join(f"{contract.name:<{width}}  {contract.promise}" for contract in CONTRACTS))
        return 0
    flags, options = _split(arguments)
    folder = Path(str(options.pop("output_dir", None) or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-verify"))
    if folder.exists():
        raise ConfigError("contracts are checked in a folder of their own", got=f"{folder}, which exists")
    only, timeout = flags["--only"].split(",") if flags["--only"] else [], _seconds(flags["--timeout"])
    # A look for CUDA devices that forks survive.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Forks of a process with threads could wait for these for ever.
    torch.set_num_threads(1)
    if flags["--callable"]:
        if options:
            fix = "leave the options out"
            raise ConfigError("a trainer of your own takes no options", got=", ".join(options), fix=fix)
        name, contracts = flags["--callable"], chosen(own_trainer.CONTRACTS, only)
        own = own_trainer.OwnTrainer(trainer=own_trainer.load_trainer(name), folder=folder.resolve())
        folder.mkdir(parents=True)
        say(f"{name}  {folder}")
        verdicts = _verdicts(contracts, own, name, folder / "verify.log", timeout)
    else:
        verdicts = _check_configurations([options] if options else DEFAULTS, only, folder, timeout)
    sys.stdout.write(json.dumps(summary(verdicts)) + "\n")
    return int(any(verdict.status == "broken" for verdict in verdicts))


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The values of the flags, and the options. Raises ConfigError."""
    flags = dict.fromkeys(FLAGS, "")
    options: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        flag, _, value = word.partition("=")
        if flag in FLAGS:
            flags[flag] = value or next(words, "")
            if not flags[flag]:
                raise ConfigError(f"{flag} needs a value", fix="kitforge verify --help shows what it takes")
        elif word.startswith("-"):
            raise ConfigError(f"unknown flag {word!r}", expected=f"--list, {', '.join(FLAGS)}")
        else:
            name, values = parse(word)
            if len(values) > 1:
                raise ConfigError(f"option {name!r} has several values", got=word, fix=f"{name}=[...] is a list")
            options[name] = values[0]
    return flags, options


def _seconds(text: str) -> float:
    try:
        seconds = float(text or TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError("invalid value for --timeout", got=text, expected="seconds above 0")
    return seconds


def _check_configurations(
    configurations: Iterable[Mapping[str, Any]], only: Sequence[str], folder: Path, timeout: float
) -> list[Verdict]:
    """Train each configuration undisturbed in this process, whose forks then find compiled kernels; then check the
    contracts on it."""
    contracts, verdicts = chosen(CONTRACTS, only), list[Verdict]()
    cases = [Case.of(choices, folder / f"{number}") for number, choices in enumerate(configurations)]
    if any(contract.name in ("ranks", "layouts") for contract in contracts):
        import_sharding()
    for number, case in enumerate(cases):
        reduced = f"  reduced: {' '.join(case.reduced)}" if case.reduced else ""
        say(f"{case.name}  {case.folder}{reduced}")
        console.quiet = True
        try:
            case.train_base()
        finally:
            console.quiet = False
        own = [contract for contract in contracts if number == 0 or not contract.is_of_device]
        found = _verdicts(own, case, case.name, case.folder / "verify.log", timeout)
        verdicts += found
        write_verdicts(case.base, found)
        say(f"  report  {write_report([case.base])}")
    return verdicts


def _verdicts(
    contracts: Iterable[Contract[SubjectT]], subject: SubjectT, name: str, log: Path, timeout: float
) -> list[Verdict]:
    verdicts = []
    for verdict in run_contracts(contracts, subject, name, log, timeout=timeout, started=_show_progress):
        say(line(verdict))
        verdicts.append(verdict)
    return verdicts


def _show_progress(promise: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r  checking: {promise} ...\033[K\r")
        sys.stderr.flush()


def line(verdict: Verdict) -> str:
    """A verdict in one line: status, promise, figure of its bound, seconds. A longer error stands below it."""
    promises = {each.name: each.promise for each in CONTRACTS} | {
        each.name: each.promise for each in own_trainer.CONTRACTS
    }
    bound = "" if not verdict.bound else f" of {verdict.bound:.0e}"
    figure = "" if verdict.figure is None else f"{verdict.figure:.2g}{bound} "
    first, *further = sanitize(verdict.words).splitlines() or [""]
    lines = [f"  {verdict.status:<11}  {promises[verdict.contract]:<43}  {figure}{first}  {verdict.seconds:.1f} s"]
    return "\n".join([*lines, *(f"               {each}" for each in further)])
