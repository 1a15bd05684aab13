"""`kitforge inspect`."""

from __future__ import annotations

from kitforge.api import kit_of
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console


def inspect(arguments: list[str]) -> int:
    """Show what a table holds, and the schema that it seems to ask for."""
    if len(arguments) != 1:
        raise ConfigError(
            "inspect looks at one table", got=" ".join(arguments) or "nothing", fix="kitforge inspect FILE"
        )
    console.print(kit_of("recommendation").inspected(arguments[0]))
    return 0
