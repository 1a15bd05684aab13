from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.swiglu.fused import swiglu
from kitforge.core.kernels.swiglu.reference import swiglu as reference
from tests.core.kernels.comparison import TOLERANCE, distance, random, relative, results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (0, 7), (1, 1), (5, 7), (2, 3, 9), (2, 0, 7)])
def test_it_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)]
    assert distance(swiglu, reference, inputs) < TOLERANCE[dtype]


def test_it_is_its_reference_where_the_gate_saturates() -> None:
    inputs = [random(5, 7) * 500, random(5, 7, seed=1)]
    found = results(swiglu, inputs)
    assert all(torch.isfinite(each).all() for each in found)
    assert max(map(relative, found, results(reference, inputs))) < 1e-12


def test_inputs_that_are_views_are_understood() -> None:
    gate, up = random(5, 14).chunk(2, dim=-1)
    assert distance(swiglu, reference, [gate, up]) < 1e-12


def test_a_gate_and_an_up_that_change_places_show() -> None:
    def faulty(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(up, gate)

    assert distance(faulty, reference, [random(5, 7), random(5, 7, seed=1)]) > 1e-11
