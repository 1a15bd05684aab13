"""`kitforge VERB --help` of a verb with options: all of them, by task."""

import json
from collections.abc import Iterator, Sequence

from kitforge.composition import compose_config, dotted, parse, task_of
from kitforge.foundation.config import option_help
from kitforge.foundation.log import say
from kitforge.kits.registry import kit_of
from kitforge.preset_files import groups, presets


def print_options(usage: Sequence[str], overrides: Sequence[str]) -> None:
    """Print every option of a task with its default and its help text (the comment at its field)."""
    task = task_of({option: values[0] for option, values in map(parse, overrides)})
    found = (f"  {group}={'|'.join(presets(group))}" for group in groups())
    lines = [*usage, "", "Presets, one of each group (your own are found in ./configs/GROUP/NAME.yaml):", *found, ""]
    lines += [f"Several values with commas and -m run one after the other. Options of task={task}:"]
    lines += [f"  {f'{name}={default}':<38} {words}".rstrip() for name, default, words in option_rows(task)]
    say("\n".join(lines))


def option_rows(task: str) -> Iterator[tuple[str, str, str]]:
    """The options of a task by dotted name, their defaults as they are typed, and their help texts."""
    kit = kit_of(task)
    words = option_help(kit.OPTIONS)
    for option, default in dotted(kit.resolved(kit.read_options(compose_config(task, {}).values))).items():
        yield option, json.dumps(default).replace('"', ""), words.get(option, "").replace("None:", "null:")
