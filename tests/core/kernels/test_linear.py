from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.linear import fused
from kitforge.core.kernels.linear.fused import linear, traceable_linear
from kitforge.core.kernels.linear.reference import linear as reference
from tests.core.kernels.comparison import TOLERANCE, Call, autocast, distance, random, relative, results

KERNELS = [linear, traceable_linear]
SHAPES = [(7,), (0, 7), (1, 7), (5, 7), (2, 3, 7), (2, 0, 7)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_its_reference(kernel: Call, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [random(*shape, dtype=dtype), random(3, 7, dtype=dtype), random(3, dtype=dtype)]
    assert distance(kernel, reference, inputs) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_under_autocast_it_is_near_the_exact_result(kernel: Call, shape: tuple[int, ...], native: bool) -> None:
    inputs = [random(*shape, dtype=torch.float32), random(3, 7, dtype=torch.float32), random(3, dtype=torch.float32)]
    found = results(autocast(kernel), inputs)
    assert found[0].dtype == torch.bfloat16
    for got, wanted in zip(found, results(reference, inputs), strict=True):
        assert relative(got, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("native", [False], indirect=True)
@pytest.mark.parametrize("kernel", KERNELS)
def test_where_half_is_for_storage_only_the_input_is_all_that_is_rounded(kernel: Call, native: bool) -> None:
    input, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((5, 7), (3, 7), (3,)))
    output, _, grad_weight, grad_bias = results(autocast(kernel), [input, weight, bias])
    rounded = input.bfloat16().float()
    assert torch.equal(output, functional.linear(rounded, weight, bias).bfloat16())
    gradient = random(5, 3, dtype=torch.bfloat16, seed=99).float()
    assert relative(grad_weight, gradient.t() @ rounded) < 1e-6
    assert relative(grad_bias, gradient.sum(0)) < 1e-6


@pytest.mark.parametrize("native", [False], indirect=True)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 100])
def test_parts_of_the_rows_need_not_divide_them(rows: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [random(2, 3, 7, dtype=torch.float32), random(3, 7, dtype=torch.float32), random(3, dtype=torch.float32)]
    whole = results(autocast(linear), inputs)
    monkeypatch.setattr(fused, "ROWS", rows)
    found = results(autocast(linear), inputs)
    assert torch.equal(found[0], whole[0])
    assert max(map(relative, found, whole)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("native", [False], indirect=True)
def test_inputs_in_half_precision_are_stored_as_they_are_and_shared(native: bool) -> None:
    input = random(5, 7, dtype=torch.bfloat16).requires_grad_()
    weights = [random(3, 7, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)]
    kept: set[int] = set()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.add(each.data_ptr()), each)[1], lambda each: each),
    ):
        for weight in weights:
            linear(input, weight)
    assert kept == {each.data_ptr() for each in (input, *weights)}


def test_a_layer_held_in_half_precision_is_near_the_exact_result(native: bool) -> None:
    inputs = [random(5, 7, dtype=torch.bfloat16), random(3, 7, dtype=torch.bfloat16), random(3, dtype=torch.bfloat16)]
    found = results(linear, inputs)
    wanted = results(reference, [each.float() for each in inputs])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_may_be_absent(kernel: Call, native: bool) -> None:
    found = results(autocast(kernel), [random(5, 7, dtype=torch.float32), random(3, 7, dtype=torch.float32)])
    assert relative(found[0], random(5, 7) @ random(3, 7).t()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("wants", [0, 1, 2])
def test_only_gradients_that_are_wanted_are_found(wants: int, native: bool) -> None:
    inputs = [random(5, 7, dtype=torch.float32), random(3, 7, dtype=torch.float32), random(3, dtype=torch.float32)]
    inputs[wants].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear(*inputs).float().sum().backward()
    assert [each.grad is not None for each in inputs] == [place == wants for place in range(3)]


def test_a_gradient_that_is_a_view_is_understood(native: bool) -> None:
    inputs = [random(4, 5, 7, dtype=torch.float32), random(3, 7, dtype=torch.float32)]

    def transposed(kernel: Call) -> Call:
        return lambda input, weight: kernel(input, weight).transpose(0, 1)

    found = results(autocast(transposed(linear)), inputs)
    for got, wanted in zip(found, results(transposed(reference), inputs), strict=True):
        assert relative(got, wanted) < TOLERANCE[torch.bfloat16]


def test_a_weight_that_is_off_by_a_billionth_shows() -> None:
    def faulty(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(input, weight * (1 + 1e-9), bias)

    assert distance(faulty, reference, [random(5, 7), random(3, 7), random(3)]) > 10 * TOLERANCE[torch.float64]
