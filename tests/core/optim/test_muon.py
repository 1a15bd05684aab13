"""Muon against its definition."""

import math
from collections.abc import Sequence
from typing import final

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.optim import muon
from kitforge.core.optim.muon import Muon, orthogonalize
from kitforge.foundation.errors import ModelError

# Square, tall, wide for the plain steps, wide and tall for the steps on the Gram matrix, and its transposed twin.
SHAPES = [(12, 12), (20, 16), (16, 20), (8, 30), (30, 8), (8, 30)]
RATE, DECAY, MU = 0.02, 0.1, 0.9


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_orthogonal(matrix: Tensor) -> Tensor:
    """The quintic applied to the singular values, one matrix at a time."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def reference_steps(weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = MU * momentum + (1 - MU) * gradient
        update = reference_orthogonal((1 - MU) * gradient + MU * momentum)
        weight = weight - RATE * (DECAY * weight + 0.2 * math.sqrt(max(weight.shape)) * update)
    return weight


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, seed=seed).to(dtype)) for seed, shape in enumerate(SHAPES)]


def take_steps(weights: list[nn.Parameter], optimizer: Muon, num_steps: int) -> None:
    for step in range(num_steps):
        for place, weight in enumerate(weights):
            weight.grad = random(*weight.shape, seed=100 * step + place + 50).to(weight.dtype)
        optimizer.step()


def optimizer_of(weights: list[nn.Parameter]) -> Muon:
    return Muon(weights, lr=RATE, weight_decay=DECAY, momentum=MU)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_equals_its_definition(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "has_native_matmul", lambda *_: False)
    weights = parameters(dtype)
    take_steps(weights, optimizer_of(weights), 3)
    for place, (weight, start) in enumerate(zip(weights, parameters(torch.float64), strict=True)):
        gradients = [random(*weight.shape, seed=100 * step + place + 50) for step in range(3)]
        expected = reference_steps(start.detach(), gradients)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(32, 32), (32, 40), (16, 64)])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_update_is_nearly_orthogonal(shape: tuple[int, int], bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "has_native_matmul", lambda *_: bf16)
    update = orthogonalize(random(4, *shape).float())
    values = torch.linalg.svdvals(update.float())
    assert update.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert values.max() < 1.25
    # A square random matrix has singular values so near 0 that five steps do not lift them.
    assert values.min() > 0.6 or shape[0] == shape[1]
    assert values.median() > 0.6


@pytest.mark.parametrize("shape", [(24, 24), (24, 96)])
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-3), (True, 0.3)])
def test_nearly_singular_matrices_stay_bounded_and_close_to_the_definition(
    shape: tuple[int, int], bf16: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "has_native_matmul", lambda *_: bf16)
    left, _, right = torch.linalg.svd(random(*shape), full_matrices=False)
    matrix = left @ torch.logspace(0, -7, shape[0], dtype=torch.float64).diag() @ right
    update, expected = orthogonalize(matrix.float()[None])[0].double(), reference_orthogonal(matrix)
    assert torch.linalg.svdvals(update).max() < 1.25
    assert (update - expected).norm() < tolerance * expected.norm()


def test_a_zero_gradient_moves_nothing_but_the_decay() -> None:
    weight = nn.Parameter(random(6, 4))
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer_of([weight]).step()
    torch.testing.assert_close(weight.detach(), before * (1 - RATE * DECAY), rtol=1e-15, atol=0)


def test_the_size_of_a_gradient_does_not_matter() -> None:
    small, large = nn.Parameter(random(8, 12)), nn.Parameter(random(8, 12))
    small.grad, large.grad = 1e-4 * random(8, 12, seed=1), 1e4 * random(8, 12, seed=1)
    optimizer_of([small, large]).step()
    torch.testing.assert_close(small, large, rtol=1e-12, atol=1e-12)


def test_the_root_mean_square_of_an_update_is_about_that_of_adamw() -> None:
    for shape in [(64, 64), (32, 128), (128, 32)]:
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = random(*shape).float()
        Muon([weight], lr=1.0).step()
        assert 0.14 < float(weight.detach().square().mean().sqrt()) < 0.24


def test_stacks_of_any_size_give_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = parameters(torch.float64), parameters(torch.float64)
    take_steps(together, optimizer_of(together), 2)
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 1)
    move, sizes = Muon._move, set[int]()
    monkeypatch.setattr(Muon, "_move", lambda *given: (sizes.add(len(given[1])), move(*given)))
    take_steps(apart, optimizer_of(apart), 2)
    assert sizes == {1}
    for first, second in zip(together, apart, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_a_parameter_without_gradient_stays_and_has_no_state() -> None:
    moving, resting = nn.Parameter(random(4, 4)), nn.Parameter(random(4, 4))
    moving.grad = random(4, 4, seed=1)
    optimizer = optimizer_of([moving, resting])
    optimizer.step()
    assert torch.equal(resting, random(4, 4))
    assert resting not in optimizer.state
    assert list(optimizer.state[moving]) == ["momentum"]


def test_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ModelError, match="2 dims"):
        Muon([nn.Parameter(torch.ones(3))], lr=0.1)


def test_agrees_with_the_muon_of_torch_within_its_bf16() -> None:
    ours, theirs = nn.Parameter(random(16, 24).float()), nn.Parameter(random(16, 24).float())
    optimizers = [
        Muon([ours], lr=RATE, weight_decay=DECAY, momentum=MU),
        torch.optim.Muon([theirs], lr=RATE, weight_decay=DECAY, momentum=MU, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(3):
        for weight, optimizer in zip([ours, theirs], optimizers, strict=True):
            weight.grad = random(16, 24, seed=step + 1).float()
            optimizer.step()
    moved = (ours - random(16, 24).float()).norm()
    assert (ours - theirs).norm() < 0.02 * moved


@final
class _LastColumns:
    """Pieces [8, 3] of matrices [8, 10] whose other columns are known here as well."""

    def __init__(self, others: Tensor) -> None:
        self._others = others

    def full_shape(self, piece: Tensor) -> tuple[int, ...]:
        return 8, 10

    def full_tensor(self, value: Tensor, piece: Tensor) -> Tensor:
        return torch.cat([self._others, value], dim=1)

    def shard_of(self, matrix: Tensor, piece: Tensor) -> Tensor:
        return matrix[:, 7:]


def test_a_piece_moves_as_its_matrix_does() -> None:
    start, gradient = random(8, 10), random(8, 10, seed=1)
    piece = nn.Parameter(start[:, 7:].clone())
    piece.grad = gradient[:, 7:]
    # The first momentum is a part of the gradient, and so is what is made orthogonal.
    others = (1 - MU * MU) * gradient[:, :7]
    Muon([piece], lr=RATE, weight_decay=DECAY, momentum=MU, matrices=_LastColumns(others)).step()
    torch.testing.assert_close(piece.data, reference_steps(start, [gradient])[:, 7:], rtol=0, atol=1e-11)
