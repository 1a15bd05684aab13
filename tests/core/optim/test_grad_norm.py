"""The global norm and clipping by it."""

import math

import pytest
import torch
from torch import Tensor

from kitforge.core.optim.grad_norm import CHUNK_ELEMENTS, global_norm


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 48), (7,), (), (0, 3), (2, 3, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def exact(tensors: list[Tensor]) -> float:
    return math.sqrt(math.fsum(value * value for tensor in tensors for value in tensor.double().flatten().tolist()))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 1e-6)]
)
def test_is_the_root_of_the_sum_of_all_squares(dtype: torch.dtype, tolerance: float) -> None:
    tensors = gradients(dtype)
    assert float(global_norm(tensors)) == pytest.approx(exact(tensors), rel=tolerance)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_is_one_value_in_fp32_or_wider(dtype: torch.dtype, expected: torch.dtype) -> None:
    norm = global_norm(gradients(dtype))
    assert norm.shape == ()
    assert norm.dtype == expected


def test_one_float64_gradient_makes_the_norm_float64() -> None:
    assert global_norm([torch.ones(3), torch.ones(2, dtype=torch.float64)]).dtype == torch.float64


def test_of_nothing_is_zero() -> None:
    assert float(global_norm([])) == 0.0


def test_does_not_need_contiguous_gradients() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(global_norm([matrix.T[1:]]), global_norm([matrix.T[1:].contiguous()]))


def test_stays_accurate_over_many_elements() -> None:
    # torch.linalg.vector_norm, which adds squares one by one in fp32, is 7e-5 off here on one thread.
    many = torch.rand(16 * CHUNK_ELEMENTS + 3, generator=torch.Generator().manual_seed(0))
    assert float(global_norm([many])) == pytest.approx(float(many.double().norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_shows_a_gradient_that_is_not_finite(bad: float) -> None:
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([1.0, bad])]))
