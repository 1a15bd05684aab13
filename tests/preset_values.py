"""The shipped presets as plain values, for tests that go through all of a group."""

from typing import Any

from kitforge.preset_files import presets
from kitforge.yaml_options import read_yaml, to_plain_dict


def preset_values(group: str = "model") -> dict[str, dict[str, Any]]:
    """The values of every preset of a group, by its name."""
    return {name: to_plain_dict(read_yaml(path)) for name, path in presets(group).items()}
