"""Options in YAML files: reading them, and what they may not hold. Which options exist is not known here."""

import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kitforge.foundation.errors import ConfigError
from kitforge.foundation.untrusted import check_yaml, names_function, yaml_error

# Options that may name a function on the command line; a YAML file may not, unless `allow_code=true` is typed.
CODE_OPTIONS = ("reward", "environment.name")
REFERENCE = re.compile(r"\$\{[\w.]+\}")
# Hydra composes a recipe with this first line.
_HEADER = re.compile(r"^#\s*@package\b", re.MULTILINE)
_OVERRIDE = re.compile(r"(?:override )?/(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """A recipe that is read as it stands: presets by group, and options over them."""

    presets: dict[str, str]
    values: DictConfig

    @property
    def plain(self) -> dict[str, Any]:
        """The values, with references as they are written: what they refer to may lie in a preset."""
        return cast(dict[str, Any], OmegaConf.to_container(self.values, resolve=False))


def needs_hydra(path: Path) -> bool:
    """Whether Hydra composes the recipe, of all that it finds."""
    return _HEADER.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def read_recipe(path: Path, typed: Collection[str]) -> RecipeFile:
    """Raises ConfigError for a file that holds no options. The config.yaml of a run names the run's own folder, which a
    new run leaves alone: it counts only if `resume` was `typed`."""
    values, chosen = read_yaml(path), dict[str, str]()
    for entry in values.pop("defaults", []):
        (group, name), *_ = entry.items() if isinstance(entry, DictConfig) else [(str(entry), None)]
        found = _OVERRIDE.fullmatch(str(group))
        if found is not None and isinstance(name, str):
            chosen[found[1]] = name
        elif group != "_self_":
            expected = "entries `override /GROUP: PRESET`"
            raise ConfigError(f"the defaults of {path} cannot be used", got=entry, expected=expected)
    read = RecipeFile(presets=chosen, values=values)
    folder = read.plain.get("output_dir")
    if isinstance(folder, str) and Path(folder).resolve() == path.resolve().parent and "resume" not in typed:
        values.output_dir = None
        values.resume = None if values.get("resume") == "auto" else values.get("resume")
    return read


def read_yaml(path: Path) -> Any:
    """The options of a YAML file, without interpolation. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        content = OmegaConf.load(io.StringIO(text))
    except (YAMLError, ValueError, OmegaConfBaseException) as error:
        raise yaml_error(path, error) from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path} does not hold options", got="a list", expected="name: value, a line each")
    return content


def to_plain_dict(config: Any) -> dict[str, Any]:
    """A composed configuration as a plain dict. Raises ConfigError for `_target_` and for resolvers, which could read
    the environment or run code."""
    refuse_code(OmegaConf.to_container(config, resolve=False), "")
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def refuse_functions(values: Mapping[str, Any], typed: Collection[str]) -> None:
    """Raise ConfigError for an option of a file that names code, unless the option was `typed` over it."""
    for name in CODE_OPTIONS:
        section, _, last = name.rpartition(".")
        value = (values.get(section, {}) if section else values).get(last)
        if name not in typed and names_function(value):
            raise ConfigError(
                "configuration cannot name code to run",
                got=f"{name}: {value} in a YAML file",
                fix=f"name it on the command line, {name}=package.module:function, or trust the file: allow_code=true",
            )


def refuse_code(value: Any, path: str) -> None:
    """Raise ConfigError for `_target_` and for resolvers in the values at `path`."""
    if isinstance(value, dict):
        for name, item in value.items():
            if str(name).startswith("_target_"):
                raise ConfigError(
                    "configuration cannot name code to run", got=f"{path}_target_: {item}", fix="remove it"
                )
            refuse_code(item, f"{path}{name}.")
    elif isinstance(value, list):
        for item in value:
            refuse_code(item, path)
    elif isinstance(value, str) and "${" in REFERENCE.sub("", value):
        raise ConfigError(
            "configuration cannot use resolvers",
            got=f"{path.rstrip('.')}: {value}",
            expected="values, and references to other options such as ${seed}",
            fix="write the value itself",
        )
