"""SwiGLU and GeGLU that save only their inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import REFERENCE, implementation
from tests.core.kernels.comparison import TOLERANCE, distance, random, relative, results

both = pytest.mark.parametrize("operation", ["swiglu", "geglu"])


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (0, 7), (1, 1), (5, 7), (2, 3, 9), (2, 0, 7)])
def test_it_is_its_reference(operation: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)]
    found = distance(implementation(operation, "fused"), getattr(REFERENCE, operation), inputs)
    assert found < TOLERANCE[dtype]


@both
def test_it_is_its_reference_where_the_gate_saturates(operation: str) -> None:
    inputs = [random(5, 7) * 500, random(5, 7, seed=1)]
    found = results(implementation(operation, "fused"), inputs)
    assert all(torch.isfinite(each).all() for each in found)
    assert max(map(relative, found, results(getattr(REFERENCE, operation), inputs))) < 1e-12


@both
def test_inputs_that_are_views_are_understood(operation: str) -> None:
    gate, up = random(5, 14).chunk(2, dim=-1)
    assert distance(implementation(operation, "fused"), getattr(REFERENCE, operation), [gate, up]) < 1e-12


@both
def test_a_gate_and_an_up_that_change_places_show(operation: str) -> None:
    def faulty(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = implementation(operation, "fused")(up, gate)
        return output

    assert distance(faulty, getattr(REFERENCE, operation), [random(5, 7), random(5, 7, seed=1)]) > 1e-11


@both
def test_only_gate_and_up_are_saved(operation: str) -> None:
    gate, up = random(5, 7).requires_grad_(), random(5, 7, seed=1).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        implementation(operation, "fused")(gate, up)
    assert {each.data_ptr() for each in saved} == {gate.data_ptr(), up.data_ptr()}
