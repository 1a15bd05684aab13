"""`kitforge inspect`."""

from pathlib import Path

from kitforge.composition import compose_config, parse, task_of
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import check_own, mark_own, user_path
from kitforge.foundation.log import console, say
from kitforge.kits.kit import Kit
from kitforge.kits.registry import kit_of

# Columns of rows of text and of chats.
_CHAT_COLUMNS = {"messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected", "text",
                 "instruction", "question", "answer"}  # fmt: skip


def inspect(arguments: list[str]) -> int:
    """Describe a table and propose a schema; or show the loss mask of the rows of an RLHF task."""
    files = [argument for argument in arguments if "=" not in argument]
    choices = {name: values[0] for name, values in (parse(each) for each in arguments if "=" in each)}
    target, overwrites = choices.pop("output", None), choices.pop("overwrite", False) is True
    target = None if target is None else user_path(str(target))
    if target is not None:
        check_own(target, "inspect", overwrite=overwrites)
    if choices and not files:
        return _inspect_rows(choices, target)
    if len(files) != 1 or choices:
        raise ConfigError(
            "inspect needs one table, or the rows of an RLHF task",
            got=" ".join(arguments) or "nothing",
            fix="kitforge inspect FILE [output=schema.yaml], or kitforge inspect data.train=FILE checkpoint=FOLDER",
        )
    return _describe(files[0], target)


def _describe(source: object, target: Path | None) -> int:
    console.print(kit_of("recommendation").describe_data(source, target))
    if target is not None:
        mark_own(target, "inspect")
        say(f"wrote {target}, for data.schema={target}")
    return 0


def _inspect_rows(choices: dict[str, object], target: Path | None) -> int:
    """The rows as the task of the checkpoint reads them; as `sft` if that task shows none."""
    task = task_of(choices)
    source = choices.get("data.train")
    if task == "recommendation" or (not {"task", "checkpoint"} & set(choices) and _is_table(source)):
        return _describe(source, target)
    if target is not None:
        raise ConfigError("rows have no schema to write", got=f"output={target}", fix="leave output= out")
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
