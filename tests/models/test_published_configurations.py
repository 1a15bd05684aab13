"""config.json files with all the keys that publishers and their tools write are read; sizes are small ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.models.catalog import converter_of_type

LINES = Path(__file__).with_name("published_configurations.jsonl").read_text(encoding="utf-8").splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {each["name"]: each["config"] for each in map(json.loads, LINES)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_with_all_that_publishers_write_is_read(name: str) -> None:
    values = PUBLISHED[name]
    config: Any = converter_of_type(values["model_type"]).read_config(values)
    assert (config.dim, config.num_layers) == (64, 2)
