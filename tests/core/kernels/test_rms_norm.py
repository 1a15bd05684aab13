from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.rms_norm.fused import rms_norm
from kitforge.core.kernels.rms_norm.reference import rms_norm as reference
from tests.core.kernels.comparison import TOLERANCE, Call, distance, poison, random, relative, results

EPS = 1e-6
SHAPES = [(7,), (0, 7), (1, 7), (5, 7), (2, 3, 4, 7), (2, 0, 7), (3, 1)]


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert distance(partial(rms_norm, eps=EPS), partial(reference, eps=EPS), inputs_of(shape, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1e10])
def test_it_is_its_reference_for_tiny_and_huge_rows(scale: float) -> None:
    inputs = [random(5, 7, dtype=torch.float32) * scale, random(7, dtype=torch.float32)]
    found, wanted = results(partial(rms_norm, eps=EPS), inputs), results(partial(reference, eps=EPS), inputs)
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kernel", [rms_norm, reference])
def test_a_row_of_zeros_stays_zero(kernel: Call) -> None:
    found = results(partial(kernel, eps=EPS), [torch.zeros(2, 7), torch.ones(7)])
    assert torch.equal(found[0], torch.zeros(2, 7))
    assert all(torch.isfinite(each).all() for each in found)


@pytest.mark.parametrize("kernel", [rms_norm, reference])
def test_half_precision_is_reduced_in_fp32(kernel: Call) -> None:
    inputs = inputs_of((5, 300), torch.bfloat16)
    found = results(partial(kernel, eps=EPS), inputs)
    assert found[0].dtype == torch.bfloat16
    wanted = results(partial(reference, eps=EPS), [each.float() for each in inputs])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


def test_rows_that_are_views_are_understood() -> None:
    inputs = [random(7, 5, 4).transpose(0, 2), random(7)]
    assert distance(partial(rms_norm, eps=EPS), partial(reference, eps=EPS), inputs) < 1e-12


@pytest.mark.parametrize("wants", [0, 1])
def test_only_gradients_that_are_wanted_are_found(wants: int) -> None:
    inputs = inputs_of((5, 7), torch.float64)
    inputs[wants].requires_grad_()
    rms_norm(*inputs, EPS).sum().backward()
    assert [each.grad is not None for each in inputs] == [place == wants for place in range(2)]


def test_another_epsilon_shows() -> None:
    inputs = inputs_of((5, 7), torch.float64)
    assert distance(partial(rms_norm, eps=2 * EPS), partial(reference, eps=EPS), inputs) > 1e-11


def test_a_gradient_that_takes_the_scale_for_a_constant_shows() -> None:
    def faulty(input: Tensor, weight: Tensor) -> Tensor:
        return input * torch.rsqrt(input.detach().square().mean(-1, keepdim=True) + EPS) * weight

    inputs = inputs_of((5, 7), torch.float64)
    assert relative(faulty(*inputs), reference(*inputs, EPS)) < 1e-12
    assert distance(faulty, partial(reference, eps=EPS), inputs) > 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e10])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_few_rows_without_a_gradient_are_its_reference(
    shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    compiled = pytest.importorskip("kitforge.core.kernels.rms_norm.numba").rms_norm
    input, weight = ((each * size).to(dtype) for each, size in zip(inputs_of(shape, dtype), (scale, 1), strict=True))
    # Neither an input nor a weight that is part of a larger one may be misread.
    input, weight = (torch.stack((each, each * 2), -1)[..., 0] for each in (input, weight))
    poison()
    found = compiled(input, weight, EPS)
    assert found.dtype == dtype
    assert relative(found, reference(input.double(), weight.double(), EPS)) < TOLERANCE[dtype] / 2
    assert torch.equal(select("O1").rms_norm(input, weight, EPS), found)


@torch.no_grad()
def test_what_is_not_finite_shows_in_its_row() -> None:
    compiled = pytest.importorskip("kitforge.core.kernels.rms_norm.numba").rms_norm
    input = torch.ones(4, 19)
    input[1, 3], input[2, 18] = float("nan"), float("inf")
    assert torch.equal(compiled(input, torch.ones(19), EPS).isfinite().all(1), torch.tensor([True, False, False, True]))
