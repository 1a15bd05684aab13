"""`kitforge config`, `report` and `doctor`, and the tables of `list`: information without training."""

import importlib.metadata
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kitforge.cli.command import Invocation
from kitforge.cli.listing import refuse, version
from kitforge.composition import parse
from kitforge.foundation import device as devices
from kitforge.foundation.config import to_yaml
from kitforge.foundation.errors import ConfigError, installation
from kitforge.foundation.files import check_own, mark_own, user_path, write_text
from kitforge.foundation.log import console, sanitize, say
from kitforge.kits.registry import DEFAULT_TASK, kit_of, task_names
from kitforge.preset_files import presets
from kitforge.report.page import write_report
from kitforge.report.profile_page import COLUMNS, findings, profile_page, rank_rows
from kitforge.report.rank_trace import FOLDER, read_traces
from kitforge.report.step_times import step_times
from kitforge.yaml_options import read_yaml, to_plain_dict

_MOST_RANKS = 16


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
    say(f"wrote {write_report([Path(argument) for argument in arguments])}")
    return 0


def profile(arguments: list[str]) -> int:
    """Say where the time of the traced steps of a run went, and write the page about it."""
    folders = [Path(argument) for argument in arguments if "=" not in argument]
    options = {name: values[0] for name, values in (parse(each) for each in arguments if "=" in each)}
    if len(folders) != 1 or options.keys() - {"output", "partial", "overwrite"}:
        got, fix = " ".join(arguments) or "nothing", "kitforge profile RUN [output=FILE.html] [partial=true]"
        raise ConfigError("profile needs one run", got=got, fix=fix)
    target = user_path(str(options.get("output", folders[0] / FOLDER / "times.html")))
    check_own(target, "profile", overwrite=options.get("overwrite") is True)
    times = step_times(read_traces(folders[0], partial=options.get("partial") is True))
    title = f"milliseconds, medians over steps {times.steps[0]} to {times.steps[-1]}"
    table = Table("", *COLUMNS, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, cells in rank_rows(times, _MOST_RANKS):
        table.add_row(name, *cells)
    console.print(table)
    say("\n".join(f"- {words}" for words in findings(times)))
    write_text(target, profile_page(times, folders[0].resolve().name))
    mark_own(target, "profile")
    say(f"wrote {target}")
    return 0


def described_presets() -> dict[str, Any]:
    """The tables of `kitforge list`: rows of presets by task, and the tasks without rows of their own."""
    models = {name: to_plain_dict(read_yaml(path)) for name, path in presets("model").items()}
    described = {task: kit_of(task).describe_presets(models) for task in sorted(task_names())}
    tables: dict[str, Any] = {}
    for task, rows in described.items():
        if not rows:
            tables.setdefault("tasks without presets of models", []).append(task)
        elif rows == described[DEFAULT_TASK] and task != DEFAULT_TASK:
            tables.setdefault(f"tasks that start from the models of {DEFAULT_TASK}", []).append(task)
        else:
            same = [other for other, others in described.items() if others == rows and task != DEFAULT_TASK]
            tables[", ".join(f"task {each}" for each in same or [task])] = rows
    return dict(sorted(tables.items(), key=lambda table: isinstance(table[1][0], str)))


def doctor(arguments: list[str]) -> int:
    """Print devices, package versions, and a one-second speed test."""
    refuse("doctor", arguments)
    table = Table(show_header=False)
    for name, value in _machine_info().items():
        table.add_row(name, escape(value))
    console.print(table)
    return 0


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
    shown = {extra: ", ".join(f"{name} {version(name)}" for name in names) for extra, names in held.items()}
    return {
        f"extra {extra}": f"{text}: {installation(extra, extra)}" if "not installed" in text else text
        for extra, text in shown.items()
    }


def _matrix_speed(device: torch.device) -> float:
    """GFLOP/s of fp32 products of 1024 x 1024 matrices, measured for half a second."""
    left, right = torch.randn(2, 1024, 1024, device=device)
    torch.mm(left, right)
    devices.synchronize(device)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 0.5:
        torch.mm(left, right)
        devices.synchronize(device)
        count += 1
    return count * 2 * 1024**3 / (time.perf_counter() - started) / 1e9
