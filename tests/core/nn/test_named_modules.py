"""Modules by any name: nothing that Python's modules own is taken from a user, and other names stay as they were."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kitforge.core.nn.named_modules import NamedModules

NAMES = ["items", "keys", "values", "type", "pop", "update", "training", "user.id", "a/b", "%items", "", "site"]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_any_name(name: str) -> None:
    layer = nn.Linear(1, 1)
    modules = copy.deepcopy(NamedModules({name: layer, "plain": nn.Linear(1, 1)}))
    assert name in modules and list(modules) == list(modules.keys()) == [name, "plain"]
    assert dict(modules.items())[name] is modules[name] and len(modules) == 2
    (path, *_), *_ = modules.named_parameters()
    assert modules.get_submodule(path.rpartition(".")[0]) is modules[name]
    modules.load_state_dict(modules.state_dict())


@given(st.lists(st.text(st.sampled_from("%.25aE"), max_size=4), unique=True))
def test_names_are_never_merged(names: list[str]) -> None:
    modules = NamedModules({name: nn.Identity() for name in names})
    assert list(modules) == names


def test_names_that_a_module_dict_takes_are_the_same_in_a_state_dict() -> None:
    layers = {name: nn.Linear(1, 1) for name in ("site", "user id", "deep_16_of_ä")}
    assert list(NamedModules(layers).state_dict()) == list(nn.ModuleDict(layers).state_dict())
