"""The options of config.yaml files as flat names and texts, and the differences between runs.

Not a YAML parser: the files are written by a dumper, so lines and indentation carry the structure. A line that is no
option by itself (a list item, a continued text) belongs to the option above it.
"""

import re
from collections.abc import Sequence

_OPTION = re.compile(r"""^("[^"]*"|'[^']*'|[^\s#:'"-][^:#]*|-[^\s:#][^:#]*):(?:\s+(.*))?$""")
# How a line begins that is a warning about the inputs of a run.
NOTE = "# note: "
# Characters of an option's value in the name of a run.
_LONGEST_VALUE = 24


def notes(text: str) -> list[str]:
    """The warnings about the inputs of a run."""
    return [line.removeprefix(NOTE) for line in text.splitlines() if line.startswith(NOTE)]


def options(text: str) -> dict[str, str]:
    """Every option of `text` that has a value, by its dotted name."""
    found: dict[str, list[str]] = {}
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        content = line.strip()
        if not content or content.startswith(("#", "---")):
            continue
        item = content.removeprefix("- ").lstrip()
        match = _OPTION.match(item)
        if match:
            # An option in an item of a list stands as deep as its first letter.
            indent = len(line.rstrip()) - len(item)
            while parents and parents[-1][0] >= indent:
                parents.pop()
            parents.append((indent, match[1].strip().strip("\"'")))
        value = (match[2] or "") if match else item
        # A name that comes again (items of a list) adds to the value, so that no difference is lost.
        found.setdefault(".".join(key for _, key in parents), []).append(value)
    joined = {name: " ".join(value for value in values if value) for name, values in found.items()}
    return {name: value for name, value in joined.items() if value}


def differences(texts: Sequence[str]) -> tuple[dict[str, list[str | None]], int]:
    """The options in which `texts` differ, with their values in every text (None: absent), and how many agree."""
    trees = [options(text) for text in texts]
    names = sorted({name for tree in trees for name in tree})
    rows = {name: [tree.get(name) for tree in trees] for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    return differing, len(rows) - len(differing)


def distinguishing(texts: Sequence[str]) -> list[str] | None:
    """A name for each of several configurations, all different, by as few of the options in which they differ as tell
    them apart; None if short options do not."""
    differing, _ = differences(texts)
    names = [""] * len(texts)
    # Of options that follow from the network, the network is named, and the seed only where nothing else differs.
    for option in sorted(differing, key=lambda name: (name == "seed", not name.endswith((".family", ".name")), name)):
        words = option.rpartition(".")[2].replace("_", " ")
        values = [None if value is None else value.strip("\"'") for value in differing[option]]
        parts = [f"no {words}" if value is None else f"{words} {value}" for value in values]
        found = [f"{name}, {each}".strip(", ") for name, each in zip(names, parts, strict=True)]
        is_short = all(len(str(value)) <= _LONGEST_VALUE for value in values)
        if is_short and option != "output_dir" and len(set(found)) > len(set(names)):
            names = found
    return names if len(set(names)) == len(names) else None
