"""`kitforge inspect`."""

from __future__ import annotations

from kitforge.cli.console import say
from kitforge.composition import compose_config, parse, task_of
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console
from kitforge.kits.registry import RLHF_TASKS, kit_of


def inspect(arguments: list[str]) -> int:
    """Show what a table holds, and the schema that it seems to ask for; or which tokens of rows are learnt."""
    if arguments and all("=" in argument for argument in arguments):
        return _inspect_rows({name: values[0] for name, values in map(parse, arguments)})
    if len(arguments) != 1:
        raise ConfigError(
            "inspect looks at one table, or at the rows of an alignment task",
            got=" ".join(arguments) or "nothing",
            fix="kitforge inspect FILE, or kitforge inspect data.train=FILE checkpoint=FOLDER",
        )
    console.print(kit_of("recommendation").describe_data(arguments[0]))
    return 0


def _inspect_rows(choices: dict[str, object]) -> int:
    """The rows as the task of the checkpoint reads them, where that is one of alignment, else as `sft` does."""
    task = task_of(choices)
    if task not in RLHF_TASKS:
        if "task" in choices:
            expected = f"one of {', '.join(RLHF_TASKS)}"
            raise ConfigError("inspect shows what alignment tasks learn", got=f"task={task}", expected=expected)
        task = "sft"
    kit = kit_of(task)
    for line in kit.inspect_rows(kit.read_options(compose_config(task, choices).values)):
        say(line)
    return 0
