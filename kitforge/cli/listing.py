"""`kitforge list` and the versions of packages, without torch."""

import importlib.metadata

from rich.padding import Padding
from rich.table import Table

from kitforge.cli.command import imported
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.foundation.untrusted import load_yaml
from kitforge.preset_files import CONFIGS, OWN_CONFIGS, groups, presets


def list_presets(arguments: list[str]) -> int:
    """Print the tasks with their model presets, and the presets of every other group."""
    refuse("list", arguments)
    # The shipped networks are counted in a file; those of others have to be built.
    is_shipped = not (OWN_CONFIGS / "model").is_dir() and not importlib.metadata.entry_points(group="kitforge.kits")
    counted = load_yaml((CONFIGS / "presets.yaml").read_text(encoding="utf-8")) if is_shipped else None
    for title, rows in (counted or imported("cli.info:described_presets")()).items():
        if isinstance(rows[0], dict):
            console.print(_table(title, rows))
        else:
            say(f"{title}:")
            console.print(Padding(", ".join(rows), (0, 0, 1, 2)))
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


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def refuse(verb: str, arguments: list[str]) -> None:
    """Raise ConfigError for arguments of a verb that takes none."""
    if arguments:
        raise ConfigError(f"kitforge {verb} takes no options", got=" ".join(arguments))
