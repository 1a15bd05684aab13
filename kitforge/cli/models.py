"""`kitforge models`: pretrained checkpoints by name."""

from rich.table import Table

from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.models.hub import NAMED, fetch


def models(arguments: list[str]) -> int:
    """List the named checkpoints, or fetch some of them."""
    if not arguments:
        table = Table.grid(padding=(0, 2))
        for name, checkpoint in NAMED.items():
            where = str(checkpoint.path) if checkpoint.path.is_file() else f"kitforge models fetch {name}"
            table.add_row(name, checkpoint.description, f"{checkpoint.size / 1e6:.0f} MB", where)
        console.print(table)
        return 0
    if arguments[0] != "fetch" or len(arguments) == 1:
        got = " ".join(["kitforge models", *arguments])
        raise ConfigError("this is not how models are fetched", got=got, expected="kitforge models [fetch NAME ...]")
    for name in arguments[1:]:
        say(f"{name}: {fetch(name)}")
    say(f"try it: kitforge chat checkpoint={arguments[1]}")
    return 0
