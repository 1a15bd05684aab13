"""`kitforge config`, `report`, `list` and `doctor`: information without training."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import sys
import time
from pathlib import Path

import torch
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from kitforge.cli.command import Invocation
from kitforge.cli.console import say
from kitforge.composition import groups, preset_values, presets
from kitforge.foundation import device as devices
from kitforge.foundation.config import to_yaml
from kitforge.foundation.errors import ConfigError, installation
from kitforge.foundation.log import console, sanitize
from kitforge.kits.registry import kit_of, task_names
from kitforge.report.page import write_report


def config(chosen: Invocation) -> int:
    """Print the resolved options, and a summary of derived values as a comment."""
    sys.stdout.write(sanitize(to_yaml(chosen.kit.resolved(chosen.options))))
    if chosen.options.summary is not None:
        sys.stdout.write(f"# {chosen.options.summary}\n")
    return 0


def report(arguments: list[str]) -> int:
    """Write the report of one run, or a comparison of several."""
    if not arguments:
        raise ConfigError("a report needs at least one run", fix="kitforge report runs/latest")
    target = write_report([Path(argument) for argument in arguments])
    say(f"wrote {target}")
    return 0


def list_presets(arguments: list[str]) -> int:
    """Print the tasks with their model presets, and the presets of every other group."""
    _refuse("list", arguments)
    models = preset_values("model")
    others: dict[str, list[str]] = {}
    for task in sorted(task_names()):
        kit = kit_of(task)
        if rows := kit.describe_presets(models):
            console.print(_table(f"task {task}", rows))
        else:
            title = "tasks without presets of models"
            if "model" in {each.name for each in dataclasses.fields(kit.OPTIONS)}:
                title = "tasks that start from the models of text_generation"
            others.setdefault(title, []).append(task)
    for title, names in others.items():
        say(f"{title}:")
        console.print(Padding(", ".join(names), (0, 0, 1, 2)))
    choices = Table.grid(padding=(0, 1))
    for group in groups():
        if group != "model":
            choices.add_row(group, ", ".join(presets(group)))
    console.print(choices)
    return 0


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("model", "family") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def doctor(arguments: list[str]) -> int:
    """Print devices, package versions, and a one-second speed test."""
    _refuse("doctor", arguments)
    table = Table(show_header=False)
    for name, value in _machine_info().items():
        table.add_row(name, escape(value))
    console.print(table)
    return 0


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _machine_info() -> dict[str, str]:
    facts = {
        "kitforge": version("kitforge"),
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "devices": ", ".join(devices.available()),
        "bfloat16": "native" if devices.has_native_matmul(torch.bfloat16) else "stored only, computed in fp32",
    }
    for kind in devices.available():
        device = torch.device(kind)
        facts[kind] = f"{devices.describe(device)}, {_matrix_speed(device):.0f} GFLOP/s in fp32"
    return facts | {"numba": version("numba")} | _extras()


def _extras() -> dict[str, str]:
    """By extra, the versions of its packages, or the command that installs those that are missing."""
    held: dict[str, list[str]] = {}
    is_installed = version("kitforge") != "not installed"
    for requirement in (importlib.metadata.requires("kitforge") or ()) if is_installed else ():
        package, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == ['\"](\w+)", requirement)
        if package and extra and extra[1] not in ("all", "dev"):
            held.setdefault(extra[1], []).append(package[0])
    absent = {extra: [name for name in names if version(name) == "not installed"] for extra, names in held.items()}
    return {
        f"extra {extra}": f"without {', '.join(absent[extra])}: {installation(extra, extra)}"
        if absent[extra]
        else ", ".join(f"{name} {version(name)}" for name in names)
        for extra, names in held.items()
    }


def _matrix_speed(device: torch.device) -> float:
    """GFLOP/s of fp32 products of 1024 x 1024 matrices, measured for half a second."""
    size = 1024
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    torch.mm(left, right)
    devices.synchronize(device)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 0.5:
        torch.mm(left, right)
        devices.synchronize(device)
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - started) / 1e9


def _refuse(verb: str, arguments: list[str]) -> None:
    if arguments:
        raise ConfigError(f"kitforge {verb} takes no options", got=" ".join(arguments))
