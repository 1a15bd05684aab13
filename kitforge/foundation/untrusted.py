"""Readers of untrusted JSON and YAML: bounded in size and depth; every failure is a ValueError.

The caller adds the name of the file to the message.
"""

import json
import re
from typing import Any

import yaml

from kitforge.foundation.errors import ConfigError

# Limits of a YAML document: nodes with every alias expanded, and nesting depth.
MAX_YAML_NODES = 100_000
MAX_YAML_DEPTH = 100
_FUNCTION = re.compile(r"[\w.]+:[\w.]+")
# That of libyaml, where PyYAML has it, takes a tenth of the time.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON document in UTF-8. Raises ValueError for invalid JSON, for nesting beyond Python's limit, and
    for a lone surrogate, which UTF-8 cannot encode."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start]!a}, half of a surrogate pair") from None
    return value


def load_yaml(text: str) -> Any:
    """The plain value of a YAML document. Raises ValueError as `check_yaml` does."""
    check_yaml(text)
    try:
        return yaml.load(text, Loader=_SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(error) from None


def check_yaml(text: str) -> None:
    """Raise ValueError for a document that is not YAML, or that is too large or too deep with its aliases expanded:
    nine levels of nine aliases are 600 bytes and four hundred million nodes. Builds no values."""
    # For each open container: the number of nodes before it, and its anchor.
    open_containers: list[tuple[int, str | None]] = []
    sizes: dict[str | None, int] = {}  # by anchor; None: nodes without one
    total = 0
    try:
        for event in yaml.parse(text, Loader=_SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                # An alias of an open container would contain itself; the reader tells of one that is not defined.
                is_open = any(anchor == event.anchor for _, anchor in open_containers)
                total += sizes.get(event.anchor, MAX_YAML_NODES if is_open else 1)
            elif isinstance(event, yaml.ScalarEvent):
                total += 1
                sizes[event.anchor] = 1
            elif isinstance(event, yaml.CollectionStartEvent):
                open_containers.append((total, event.anchor))
                total += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                begin, anchor = open_containers.pop()
                sizes[anchor] = total - begin
            if total >= MAX_YAML_NODES or len(open_containers) > MAX_YAML_DEPTH:
                raise ValueError(
                    f"it has {MAX_YAML_NODES} values or more with its aliases written out, or more than "
                    f"{MAX_YAML_DEPTH} levels"
                )
    except yaml.YAMLError as error:
        raise _not_yaml(error) from None


def _not_yaml(error: Exception) -> ValueError:
    return ValueError(" ".join(str(error).split()).replace('in "<unicode string>", ', "at "))


def yaml_error(path: object, error: Exception) -> ConfigError:
    """The error for a file that is not YAML, or not YAML that can be used."""
    fix = "mend that place; a text with a colon, a quote or a bracket stands in quotes"
    got = _not_yaml(error)
    return ConfigError(f"{path} is not YAML that can be used", got=got, expected="name: value, a line each", fix=fix)


def names_function(value: object) -> bool:
    """Whether a value is or contains `package.module:function`. A configuration file may not name code."""
    if isinstance(value, dict):
        return any(map(names_function, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(names_function, value))
    return isinstance(value, str) and _FUNCTION.fullmatch(value) is not None
