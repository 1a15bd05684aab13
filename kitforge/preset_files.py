"""The YAML files of presets: those of this package, and those of ./configs. Nothing is read here."""

from pathlib import Path

from kitforge.foundation.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
OWN_CONFIGS = Path("configs")
# Of recipes by path.
RECIPE_SUFFIXES = (".yaml", ".yml")


def presets(group: str = "model") -> dict[str, Path]:
    """The presets of a group: shipped YAML files and those of ./configs."""
    shipped = {path.stem: path for path in sorted((CONFIGS / group).glob("*.yaml"))}
    own = {path.stem: path for path in sorted((OWN_CONFIGS / group).glob("*.yaml"))}
    for name in shipped.keys() & own.keys():
        raise ConfigError("a preset of your own has the name of a shipped one", got=own[name], fix="rename the file")
    return shipped | own


def groups() -> list[str]:
    """The preset groups of a configuration."""
    return sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name not in ("task", "cluster"))
