"""The kit interface: the front end knows kits by `Kit` alone."""

import ast
from pathlib import Path

from kitforge.kits.registry import task_names

ROOT = Path(__file__).parents[2] / "kitforge"
API_LINES = 250


def violations(text: str) -> list[str]:
    """Untyped values, names of tasks, and imports of a kit in the source of the front end."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id == "Any":
            found.append(f"line {node.lineno}: Any")
        if isinstance(node, ast.Constant) and node.value in task_names():
            found.append(f"line {node.lineno}: the task {node.value!r}")
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if module.startswith("kitforge.kits.") and module.count(".") > 2:
            found.append(f"line {node.lineno}: {module}")
    return found


def test_the_front_end_knows_kits_by_their_interface_alone() -> None:
    text = (ROOT / "api.py").read_text()
    assert violations(text) == []
    assert len(text.splitlines()) < API_LINES


def test_a_front_end_that_knows_more_is_noticed() -> None:
    planted = "from kitforge.kits.rlhf.build import TASKS\nx: Any = 1\ntask = 'sft'\n"
    assert len(violations(planted)) == 3


# What makes a network of a family out of its outline, its files or another network.
MAKING = {"materialize", "attach", "copy_factors", "quantize_linears", "sharding_of_network"}


def makers(text: str) -> set[str]:
    """Which of these a file names."""
    nodes = list(ast.walk(ast.parse(text)))
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return MAKING & (named | {node.attr for node in nodes if isinstance(node, ast.Attribute)})


def test_one_file_of_the_kits_decides_where_a_network_comes_from() -> None:
    """As ARCHITECTURE.md says."""
    found = {each.relative_to(ROOT): makers(each.read_text()) for each in (ROOT / "kits").rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {Path("kits/network_source.py"): MAKING}
