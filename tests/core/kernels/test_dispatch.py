from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import REFERENCE, CompileLevel, Kernels, select
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
