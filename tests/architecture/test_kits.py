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
