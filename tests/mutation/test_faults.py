"""Every fault still has its place, changes something there, and follows a renamed function."""

import ast
import builtins
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.mutation import planting
from tests.mutation.planting import Fault, planted, shape
from tests.mutation.table import ROOMS, faults, room_of


@cache
def sound_tree(path: Path) -> str:
    return ast.dump(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.id)
def test_a_fault_still_applies(fault: Fault) -> None:
    found = planted(fault)
    assert found is not None, "its function computes something else now: python scripts/mutate.py --draw draws another"
    path, text = found
    assert ast.dump(ast.parse(text)) != sound_tree(path)


@pytest.mark.parametrize("fault", [each for each in faults() if each.why], ids=lambda fault: fault.id)
def test_a_fault_written_by_hand_names_what_there_is(fault: Fault) -> None:
    place = planting.locate(fault)
    assert place is not None
    words = set(re.findall(r"\w+", place.path.read_text(encoding="utf-8")))
    words.update(*map(dir, (builtins, str, torch, torch.Tensor, torch.nn.Module)))
    name, _, argument = fault.operator.partition(":")
    # Otherwise any test would find the fault, as the name of nothing.
    if name == "constant":
        assert used_names(argument) <= words
    root = Path(__file__).parents[2]
    for file, _, test in (each.partition("::") for each in fault.tests):
        assert f"def {test.partition('[')[0]}" in (root / file).read_text(encoding="utf-8")


def test_faults_are_told_apart_and_are_drawn_from_every_room() -> None:
    names = [fault.id for fault in faults()]
    assert len(names) == len(set(names))
    drawn = [fault for fault in faults() if not fault.why]
    assert len(drawn) >= 100
    assert {room_of(fault.file) for fault in drawn} == set(ROOMS)


def test_a_renamed_function_keeps_its_shape_and_a_changed_one_does_not() -> None:
    sound = definition('def mean(values: list[int]) -> float:\n    "Says it."\n    return sum(values) / len(values)')
    renamed = definition("def average(numbers):\n    return total(numbers) / count(numbers)")
    changed = definition("def mean(values):\n    return sum(values) / (len(values) - 1)")
    assert shape(sound) == shape(renamed) != shape(changed)


@pytest.mark.parametrize(
    ("operator", "source", "faulty"),
    [
        ("comparison", "a < b", "a <= b"),
        ("sign", "a * b", "a / b"),
        ("sign", "-a", "a"),
        ("boolean", "a and b", "a or b"),
        ("swapped arguments", "f(a, b, c)", "f(b, a, c)"),
        ("off by one", "3", "4"),
        ("child:0", "loss * scale", "loss"),
        ("constant:True", "a", "True"),
        ("ends with", "host == 'localhost'", "host.endswith('localhost')"),
        ("without last", "a or b or c", "a or b"),
    ],
)
def test_an_operator_changes_what_it_says(operator: str, source: str, faulty: str) -> None:
    node = ast.parse(source, mode="eval").body
    changed = planting.apply(operator, node)
    assert changed is not None
    assert ast.unparse(changed) == ast.unparse(ast.parse(faulty, mode="eval"))


def used_names(source: str) -> set[str]:
    """The names and attributes of an expression, without those that it binds itself."""
    found = list(ast.walk(ast.parse(source, mode="eval")))
    named = [node for node in found if isinstance(node, ast.Name)]
    names = {node.id for node in named} - {node.id for node in named if isinstance(node.ctx, ast.Store)}
    return names | {node.attr for node in found if isinstance(node, ast.Attribute)}


def definition(source: str) -> ast.FunctionDef:
    found = ast.parse(source).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found
