from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.rotary.fused import rotary
from kitforge.core.kernels.rotary.reference import rotary as reference
from tests.core.kernels.comparison import TOLERANCE, Call, distance, poison, random, relative, results

# batch, heads, length, head_dim, pairs, batch of the angles
SHAPES = [(2, 3, 5, 8, 4, 2), (2, 3, 5, 8, 4, 1), (2, 3, 7, 10, 3, 1), (1, 1, 1, 2, 1, 1), (0, 3, 5, 8, 4, 1)]
SHAPES += [(2, 3, 0, 8, 4, 2), (2, 3, 5, 9, 4, 2)]


def angles(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = random(shape[5], shape[2], shape[4]) * 3
    return turned.cos().to(dtype), turned.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = angles(shape, dtype)
    options = {"cos": cos, "sin": sin, "interleaved": interleaved}
    input = random(*shape[:4], dtype=dtype)
    assert distance(partial(rotary, **options), partial(reference, **options), [input]) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_angles_stay_fp32_beside_an_input_of_another_precision(dtype: torch.dtype, interleaved: bool) -> None:
    cos, sin = angles(SHAPES[0], torch.float32)
    options = {"cos": cos, "sin": sin, "interleaved": interleaved}
    input = random(*SHAPES[0][:4], dtype=dtype)
    found = results(partial(rotary, **options), [input])
    assert found[0].dtype == dtype
    wanted = results(partial(reference, **options), [input.double()])
    assert max(map(relative, found, wanted)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", [rotary, reference])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_lengths_and_leaves_the_rest_of_a_head(kernel: Call, interleaved: bool) -> None:
    shape = (2, 3, 7, 10, 3, 1)
    input = random(*shape[:4])
    output = kernel(input, *angles(shape, torch.float64), interleaved)
    assert relative(output.norm(dim=-1), input.norm(dim=-1)) < 1e-12
    assert torch.equal(output[..., 6:], input[..., 6:])
    assert not torch.equal(output[..., :6], input[..., :6])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_positions_only(interleaved: bool) -> None:
    def score(first: float, second: float) -> Tensor:
        turned = [torch.tensor(place) * torch.tensor([[[1.0, 0.3, 0.01]]]).double() for place in (first, second)]
        query, key = (
            rotary(random(1, 1, 1, 6, seed=seed), angle.cos(), angle.sin(), interleaved)
            for seed, angle in enumerate(turned)
        )
        return (query * key).sum()

    assert relative(score(9.0, 4.0), score(105.0, 100.0)) < 1e-12
    assert relative(score(9.0, 4.0), score(4.0, 9.0)) > 1e-3


def test_an_input_that_is_a_view_is_understood() -> None:
    cos, sin = angles(SHAPES[0], torch.float64)
    options = {"cos": cos, "sin": sin, "interleaved": False}
    assert distance(partial(rotary, **options), partial(reference, **options), [random(2, 5, 3, 8).transpose(1, 2)]) < (
        1e-12
    )


def test_a_gradient_that_is_expanded_is_understood() -> None:
    cos, sin = angles(SHAPES[0], torch.float64)
    found = []
    for kernel in (rotary, reference):
        input = random(2, 3, 5, 8).requires_grad_()
        kernel(input, cos, sin, False).sum().backward()
        found.append(input.grad)
    assert relative(found[0], found[1]) < 1e-12


def test_a_rotation_the_other_way_shows() -> None:
    cos, sin = angles(SHAPES[0], torch.float64)
    faulty = partial(rotary, cos=cos, sin=-sin, interleaved=False)
    right = partial(reference, cos=cos, sin=sin, interleaved=False)
    assert distance(faulty, right, [random(2, 3, 5, 8)]) > 1e-11


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[5] == 1])
@torch.no_grad()
def test_a_few_tokens_without_a_gradient_are_its_reference(
    shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    compiled = pytest.importorskip("kitforge.core.kernels.rotary.numba").rotary
    turn = (*angles(shape, torch.float32), interleaved)
    input = random(*shape[:4], dtype=dtype)
    for each in (input, input.transpose(1, 2).contiguous().transpose(1, 2)):
        poison()
        found = compiled(each, *turn)
        assert found.dtype == dtype
        wanted = reference(each.double(), *turn)
        assert relative(found, wanted, floor=1.0) < {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        assert torch.equal(select("O1").rotary(each, *turn), found)
