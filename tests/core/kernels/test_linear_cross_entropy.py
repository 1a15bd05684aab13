from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels import mixed_precision, vocabulary
from kitforge.core.kernels.linear_cross_entropy.chunked import linear_cross_entropy
from kitforge.core.kernels.linear_cross_entropy.reference import linear_cross_entropy as reference
from kitforge.core.kernels.vocabulary import VocabularyShard
from tests.core.kernels.comparison import (
    TOLERANCE,
    Call,
    autocast,
    distance,
    in_parts,
    poison,
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


@pytest.fixture
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of so many rows of float64 logits."""
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", request.param * VOCAB * 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_it_is_its_reference(rows: int, dtype: torch.dtype) -> None:
    targets = targets_of(rows, *range(2, rows, 3))
    kernel, exact = partial(linear_cross_entropy, targets=targets), partial(reference, targets=targets)
    assert distance(kernel, exact, operands(rows, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 3, 6, 7, 100], indirect=True)
@pytest.mark.parametrize("ignored", [(), (6,), (0, 1, 2), range(7)])
def test_chunks_need_not_divide_the_rows(ignored: tuple[int, ...], rows_at_once: None) -> None:
    targets = targets_of(7, *ignored)
    kernel, exact = partial(linear_cross_entropy, targets=targets), partial(reference, targets=targets)
    assert distance(kernel, exact, operands(7)) < 1e-12


@pytest.mark.parametrize("rows_at_once", [0, 1, 2, 3, 7], indirect=True)
def test_parts_of_a_vocabulary_give_the_whole(rows_at_once: None) -> None:
    targets = targets_of(7, 2)
    hidden, weight = operands(7)
    wanted = results(partial(reference, targets=targets), [hidden, weight])
    upstream = random(seed=99)

    def held(part: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
        own = [hidden.clone().requires_grad_(), part]
        found = linear_cross_entropy(*own, targets, shard=shard)
        return found.detach(), *torch.autograd.grad(found, own, upstream)

    # Uneven parts, the last of them empty: by their own sizes they would not exchange as often as one another.
    losses, of_hidden, of_weight = zip(*in_parts([5, 1, 5, 0], weight, held), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, wanted[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack(of_hidden).sum(0), wanted[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(of_weight), wanted[2], rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("rows_at_once", [2], indirect=True)
@pytest.mark.parametrize("wants", [0, 1])
def test_only_gradients_that_are_wanted_are_found(wants: int, rows_at_once: None) -> None:
    found = []
    for kernel in (linear_cross_entropy, reference):
        inputs = operands(5)
        inputs[wants].requires_grad_()
        poison()
        kernel(*inputs, targets_of(5)).backward()
        assert inputs[1 - wants].grad is None
        found.append(inputs[wants].grad)
    assert relative(found[0], found[1]) < 1e-12


def test_evaluation_finds_the_same_loss_and_no_gradient() -> None:
    inputs = [each.requires_grad_() for each in operands(5)]
    with torch.no_grad():
        loss = linear_cross_entropy(*inputs, targets_of(5))
    assert not loss.requires_grad
    assert relative(loss, reference(*inputs, targets_of(5)).detach()) < 1e-12


def test_the_gradient_is_that_of_a_scaled_loss() -> None:
    def scaled(kernel: Call) -> Call:
        return lambda hidden, weight: kernel(hidden, weight, targets_of(5)) * 65536.0 / 3

    assert distance(scaled(linear_cross_entropy), scaled(reference), operands(5)) < 1e-12


def test_gradients_of_several_micro_batches_add_up() -> None:
    found = []
    for kernel in (linear_cross_entropy, reference):
        weight = operands(5)[1].requires_grad_()
        for rows in (5, 3):
            kernel(operands(rows)[0], weight, targets_of(rows)).backward()
        found.append(weight.grad)
    assert relative(found[0], found[1]) < 1e-12


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


@pytest.mark.parametrize("scale", [30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tails_that_underflow_are_as_good_as_the_reference(dtype: torch.dtype, scale: float) -> None:
    targets = targets_of(7, 2)
    kernel, exact = partial(linear_cross_entropy, targets=targets), partial(reference, targets=targets)
    assert distance(kernel, exact, operands(7, dtype, scale)) < TOLERANCE[dtype]


@pytest.mark.parametrize("target", [-1, -101, VOCAB])
@pytest.mark.parametrize("kernel", [linear_cross_entropy, reference])
def test_a_target_outside_of_the_vocabulary_is_refused(kernel: Call, target: int) -> None:
    targets = targets_of(5)
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        kernel(*operands(5), targets)


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_it_is_near_the_exact_result(hidden_dtype: torch.dtype, rows: int, native: bool) -> None:
    targets = targets_of(rows, *range(2, rows, 3))
    hidden, weight = operands(rows, torch.float32)
    found = results(autocast(partial(linear_cross_entropy, targets=targets)), [hidden.to(hidden_dtype), weight])
    assert found[0].dtype == torch.float32
    wanted = results(partial(reference, targets=targets), [hidden, weight])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


def test_a_model_held_in_half_precision_is_near_the_exact_result(native: bool) -> None:
    targets = targets_of(7, 2)
    inputs = operands(7, torch.bfloat16)
    found = results(partial(linear_cross_entropy, targets=targets), inputs)
    assert found[0].dtype == torch.float32
    wanted = results(partial(reference, targets=targets), [each.float() for each in inputs])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows_at_once", [2], indirect=True)
def test_a_chunk_that_is_left_out_shows(rows_at_once: None) -> None:
    targets = targets_of(7)

    def faulty(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden[:6], weight, targets[:6])

    assert distance(faulty, partial(reference, targets=targets), operands(7)) > 1e-11


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
