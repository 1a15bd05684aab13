from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from kitforge.core.kernels.linear_cross_entropy.reference import linear_cross_entropy as reference
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard
from tests.core.kernels.comparison import (
    Call,
    distance,
    in_parts,
    random,
    relative,
    results,
)

VOCAB, DIM = 11, 6


def operands(rows: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    return [random(rows, DIM, dtype=dtype) * scale, random(VOCAB, DIM, dtype=dtype)]


def targets_of(rows: int, *ignored: int) -> Tensor:
    targets = torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[list(ignored)] = -100
    return targets


@pytest.mark.parametrize("kernel", [linear_cross_entropy, reference])
def test_no_targets_at_all_give_zero_loss_and_zero_gradients(kernel: Call) -> None:
    found = results(partial(kernel, targets=targets_of(7, *range(7))), operands(7))
    assert all(torch.equal(each, torch.zeros_like(each)) for each in found)


def test_an_ignored_row_has_no_gradient_and_no_influence() -> None:
    targets = targets_of(7, 3)
    first, grad_hidden, grad_weight = results(partial(linear_cross_entropy, targets=targets), operands(7))
    assert torch.equal(grad_hidden[3], torch.zeros(DIM, dtype=torch.float64))
    inputs = operands(7)
    inputs[0][3] = 1e3
    second, _, other_weight = results(partial(linear_cross_entropy, targets=targets), inputs)
    assert relative(second, first) < 1e-12
    assert relative(other_weight, grad_weight) < 1e-12


def test_evaluation_finds_the_same_loss_and_no_gradient() -> None:
    inputs = [each.requires_grad_() for each in operands(5)]
    with torch.no_grad():
        loss = linear_cross_entropy(*inputs, targets_of(5))
    assert not loss.requires_grad
    assert relative(loss, reference(*inputs, targets_of(5)).detach()) < 1e-12


def test_one_graph_may_use_it_more_than_once() -> None:
    def twice(kernel: Call) -> Call:
        return lambda hidden, weight: kernel(hidden, weight, targets_of(5)) + 2 * kernel(-hidden, weight, targets_of(5))

    assert distance(twice(linear_cross_entropy), twice(reference), operands(5)) < 1e-12


def test_a_second_backward_pass_is_refused_rather_than_wrong() -> None:
    hidden, weight = (each.requires_grad_() for each in operands(5))
    loss = linear_cross_entropy(hidden, weight, targets_of(5))
    (3 * loss).backward(retain_graph=True)
    assert hidden.grad is not None
    before = hidden.grad.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.equal(hidden.grad, before)


@pytest.mark.parametrize("power", [1, 2])
def test_a_second_derivative_is_that_of_the_reference(power: int) -> None:
    """Of the loss itself too, whose incoming gradient of 1 requires no gradient."""

    def curvature(kernel: Call) -> Tensor:
        root, weight = (each.requires_grad_() for each in operands(5))
        loss = kernel(root.tanh(), weight, targets_of(5)).pow(power)
        (gradient,) = torch.autograd.grad(loss, root, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), root)[0]

    torch.testing.assert_close(curvature(linear_cross_entropy), curvature(reference), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", [-1, -101, VOCAB])
@pytest.mark.parametrize("kernel", [linear_cross_entropy, reference])
def test_a_target_outside_of_the_vocabulary_is_refused(kernel: Call, target: int) -> None:
    targets = targets_of(5)
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        kernel(*operands(5), targets)


def fp16_gradients(kernel: Call, hidden: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of a loss that was scaled for the backward pass, divided by the scale again."""
    inputs = [each.detach().clone().requires_grad_() for each in (hidden, weight)]
    of_hidden, of_weight = torch.autograd.grad(kernel(*inputs) * scale, inputs)
    return of_hidden.double() / scale, of_weight.double() / scale


@pytest.mark.parametrize("sharpness", [1.0, 40.0])
@pytest.mark.parametrize("held", ["whole", "in parts"])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.float16])
def test_fp16_gradients_are_scaled_before_they_are_rounded(
    sharpness: float, held: str, hidden_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.float16, True)
    rows, vocab, scale = 24, 20000, 65536.0 / 24
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 16, generator=generator).half().float()
    weight = torch.randn(vocab, 16, generator=generator) * 0.04 * sharpness
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[5] = -100
    no_target = torch.ones(vocab, dtype=torch.bool).index_fill(0, targets[targets != -100], False)

    def torchs(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            logits = functional.linear(hidden, weight)
        return functional.cross_entropy(logits.float(), targets, reduction="sum")

    def ours(hidden: Tensor, weight: Tensor, shard: VocabularyShard | None = None) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return linear_cross_entropy(hidden.to(hidden_dtype), weight, targets, shard=shard)

    exact = fp16_gradients(partial(reference, targets=targets), hidden.double(), weight.double(), 1.0)
    if held == "whole":
        found = fp16_gradients(ours, hidden, weight, scale)
    else:
        parts = in_parts(
            [vocab // 2, 0, vocab // 2],
            weight,
            lambda part, shard: fp16_gradients(partial(ours, shard=shard), hidden, part, scale),
        )
        found = torch.stack([each[0] for each in parts]).sum(0), torch.cat([each[1] for each in parts])
    wanted = fp16_gradients(torchs, hidden, weight, scale)
    # Of hidden each part gives a part, rounded by itself.
    assert relative(found[0], exact[0]) < (1.5 if held == "whole" else 6) * relative(wanted[0], exact[0])
    assert relative(found[1][no_target], exact[1][no_target]) < 1.5 * relative(
        wanted[1][no_target], exact[1][no_target]
    )
    num_lost = int((found[1] == 0).sum())
    assert num_lost <= int((wanted[1] == 0).sum()) + vocab * 16 // 1000
