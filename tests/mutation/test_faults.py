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


@pytest.mark.slow
def test_every_fault_still_applies() -> None:
    gone = [fault.id for fault in faults() if not applies(fault)]
    assert not gone, "their functions compute something else now: python scripts/mutate.py --draw draws others"


def applies(fault: Fault) -> bool:
    """Whether it has its place, changes something there, and leaves a program."""
    place, found = planting.locate(fault), planted(fault)
    if place is None or found is None:
        return False
    node = planting.nodes(place.node)[fault.node]
    changed = planting.apply(fault.operator, node)
    compile(found[1], place.path, "exec")
    return changed is not None and ast.dump(changed) != ast.dump(node)


def test_a_fault_written_by_hand_names_what_there_is() -> None:
    known, read, root = set[str](), cache(lambda path: path.read_text(encoding="utf-8")), Path(__file__).parents[2]
    known.update(*map(dir, (builtins, str, torch, torch.Tensor, torch.nn.Module)))
    for fault in (each for each in faults() if each.why):
        place = planting.locate(fault)
        assert place is not None, fault.id
        name, _, argument = fault.operator.partition(":")
        # Otherwise any test would find the fault, as the name of nothing.
        if name == "constant":
            assert used_names(argument) <= known | set(re.findall(r"\w+", read(place.path))), fault.id
        for file, _, test in (each.partition("::") for each in fault.tests):
            assert f"def {test.partition('[')[0]}" in read(root / file), fault.id


def test_faults_are_told_apart_and_are_drawn_from_every_room() -> None:
    names = [fault.id for fault in faults()]
    assert len(names) == len(set(names))
    root = Path(__file__).parents[2]
    assert all((root / place).exists() for places in ROOMS.values() for place in places)
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
