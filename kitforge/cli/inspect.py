"""`kitforge inspect`."""

from __future__ import annotations

from pathlib import Path

from kitforge.composition import compose_config, parse, task_of
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.kits.kit import Kit
from kitforge.kits.registry import kit_of

# Columns of rows of text and of chats.
_CHAT_COLUMNS = {"messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected", "text",
                 "instruction", "question", "answer"}  # fmt: skip


def inspect(arguments: list[str]) -> int:
    """Describe a table and propose a schema; or show the loss mask of the rows of an RLHF task."""
    if arguments and all("=" in argument for argument in arguments):
        return _inspect_rows({name: values[0] for name, values in map(parse, arguments)})
    if len(arguments) != 1:
        raise ConfigError(
            "inspect needs one table, or the rows of an RLHF task",
            got=" ".join(arguments) or "nothing",
            fix="kitforge inspect FILE, or kitforge inspect data.train=FILE checkpoint=FOLDER",
        )
    console.print(kit_of("recommendation").describe_data(arguments[0]))
    return 0


def _inspect_rows(choices: dict[str, object]) -> int:
    """The rows as the task of the checkpoint reads them; as `sft` if that task shows none."""
    task = task_of(choices)
    source = choices.get("data.train")
    if task == "recommendation" or (not {"task", "checkpoint"} & set(choices) and _is_table(source)):
        console.print(kit_of("recommendation").describe_data(source))
        return 0
    if "task" not in choices and type(kit_of(task)).inspect_rows is Kit.inspect_rows:
        task = "sft"
    kit = kit_of(task)
    for line in kit.inspect_rows(kit.read_options(compose_config(task, choices).values)):
        say(line)
    return 0


def _is_table(source: object) -> bool:
    """Whether a file is a table: by its suffix, or as Parquet and JSON Lines by columns that no chat rows have."""
    suffixes = set(Path(source).suffixes) if isinstance(source, str) else set()
    if not suffixes & {".parquet", ".jsonl"}:
        return bool(suffixes & {".csv", ".tsv", ".inter"})
    return not _CHAT_COLUMNS & set(open_table(source).names)
