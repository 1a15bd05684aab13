"""The command line of every benchmark. `--smoke` runs our side alone at the smallest sizes and writes nothing.

A benchmark names its smallest sizes once, in SMOKE: constants of its modules in capitals, options in small letters.
The processes that a benchmark starts inherit `--smoke` through the environment.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SMOKE = "KITFORGE_BENCHMARK_SMOKE"


class CommandLine(argparse.ArgumentParser):
    """The options of a benchmark, and `--smoke`; `--help` shows the script's docstring as it stands."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self.add_argument("--smoke", action="store_true", help="our side alone, smallest sizes; nothing is written")

    def parse(self, smoke: Mapping[str, object], *modules: dict[str, Any]) -> argparse.Namespace:
        """The arguments of the process. With `--smoke`, entries of `smoke` replace constants of `modules` and defaults
        of options; a name that is neither raises a ValueError."""
        if "--smoke" in sys.argv[1:]:
            os.environ[_SMOKE] = "1"
        for name, value in smoke.items():
            holders = [module for module in modules if name in module and name.isupper()]
            actions = [action for action in self._actions if action.dest == name]
            if not holders and not actions:
                raise ValueError(f"SMOKE has {name!r}, which is neither a constant nor an option of this benchmark")
            if not is_smoke():
                continue
            for module in holders:
                module[name] = value
            for action in actions:
                action.default, action.required = value, False
                if not action.option_strings:
                    action.nargs, action.choices = "?" if action.nargs in (None, "?") else "*", None
        return self.parse_args()


def is_smoke() -> bool:
    """True in a benchmark that was started with `--smoke`, and in the processes that it starts."""
    return _SMOKE in os.environ


def write_result(path: Path, text: str) -> None:
    """Write a page or a file of results, unless this is a smoke run."""
    if not is_smoke():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write_section(page: Path, heading: str, section: str) -> None:
    """Write a section, its title first, where the page has one of that title, else at the end."""
    sections = page.read_text(encoding="utf-8").split("\n## ") if page.exists() else [f"# {heading}\n"]
    title = section.partition("\n")[0]
    sections = [each for each in sections if each.partition("\n")[0] != title] + [section]
    write_result(page, "\n## ".join(each.rstrip("\n") + "\n" for each in sections))
