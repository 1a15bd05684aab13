"""Every option, verb and preset in our column of coming_from.md exists."""

import re
from typing import Any

import pytest

from kitforge.cli.main import COMMANDS
from kitforge.foundation.config import option_names
from kitforge.kits.registry import kit_of, task_names
from kitforge.preset_files import groups, presets
from tests.documentation.markdown import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| `")]
OURS = [code for row in ROWS for code in re.findall(r"`([^`]+)`", row)]


def known_names() -> set[str]:
    found: dict[str, Any] = {}
    for task in task_names():
        found |= option_names(kit_of(task).OPTIONS)
    return {*found, *groups(), "task", "recipe", "model"}


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 35 and len(OURS) > 40


def typed(code: str) -> list[str]:
    """Options as they are typed on a command line, and as keys of `options={...}`; not arguments of Python."""
    words = [] if re.match(r"[\w.]+\(", code) else re.findall(r"(?:^|\s)([a-z][a-z_]*(?:\.[a-z_]+)*)=", code)
    return [*words, *re.findall(r'"([a-z_]+\.[a-z_.]+)":', code)]


@pytest.mark.parametrize("code", [code for code in OURS if typed(code)])
def test_options_exist(code: str) -> None:
    known = known_names()
    assert [name for name in typed(code) if name not in known] == []


@pytest.mark.parametrize("code", [code for code in OURS if code.startswith("kitforge ")])
def test_verbs_exist(code: str) -> None:
    assert code.split()[1] in COMMANDS


@pytest.mark.parametrize(
    "name", ["gpt2_small", "gpt2_13b", "llama2_7b", "glm2_6b", "bloom_7.1b", "t5_tiny", "t5_small"]
)
def test_presets_exist(name: str) -> None:
    assert name in presets("model")
    assert name in PAGE
