from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import (
    REFERENCE,
    TABLE_REFERENCE,
    CompileLevel,
    Kernels,
    SparseUpdate,
    TableKernels,
    select,
    select_table,
)
from tests.core.kernels.comparison import random, relative

NAMES = [field.name for field in dataclasses.fields(Kernels)]


def test_level_zero_is_the_references() -> None:
    assert select("O0") is REFERENCE


def test_level_one_replaces_every_reference() -> None:
    fused = select("O1")
    assert all(getattr(fused, name) is not getattr(REFERENCE, name) for name in NAMES)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_level_is_the_same_each_time(level: CompileLevel) -> None:
    assert select(level) == select(level)


def test_loops_over_tables_are_compiled_where_numba_is() -> None:
    fast = select_table()
    for kind, one, other in (
        (TableKernels, fast, TABLE_REFERENCE),
        (SparseUpdate, fast.sparse_update, TABLE_REFERENCE.sparse_update),
    ):
        for field in dataclasses.fields(kind):
            assert getattr(one, field.name) is not getattr(other, field.name)


def test_loops_over_tables_are_the_references_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_table("cuda") is TABLE_REFERENCE
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert select_table.__wrapped__() is TABLE_REFERENCE


SECOND: dict[str, tuple[Callable[[Kernels, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda kernels, input: kernels.linear(input, random(3, 6)), (5, 6)),
    "rms_norm": (lambda kernels, input: kernels.rms_norm(input, random(6), 1e-6), (5, 6)),
    "swiglu": (lambda kernels, input: kernels.swiglu(input, input * input), (5, 6)),
    "rotary": (
        lambda kernels, input: kernels.rotary(input, random(1, 5, 3).cos(), random(1, 5, 3).sin(), False),
        (2, 2, 5, 6),
    ),
    "linear_cross_entropy": (
        lambda kernels, input: kernels.linear_cross_entropy(input, random(4, 6), torch.tensor([0, 1, 2, 3, -100])),
        (5, 6),
    ),
    "linear_log_probs": (
        lambda kernels, input: kernels.linear_log_probs(input, random(4, 6), torch.tensor([0, 1, 2, 3, 0]))[0],
        (5, 6),
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_right_or_refused(name: str) -> None:
    call, shape = SECOND[name]
    wanted = curvature(REFERENCE, call, shape)
    try:
        found = curvature(select("O1"), call, shape)
    except RuntimeError:
        return
    assert relative(found, wanted) < 1e-10


def curvature(kernels: Kernels, call: Callable[[Kernels, Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """The gradient of a function of the gradient of a function of what the kernel returns."""
    input = random(*shape).requires_grad_()
    (gradient,) = torch.autograd.grad(call(kernels, input).pow(3).sum(), input, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), input)[0]
