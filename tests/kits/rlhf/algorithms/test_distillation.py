"""Divergences of a student from its teacher, against plain loops over the vocabulary, in float64."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError
from kitforge.kits.rlhf.algorithms import distillation
from kitforge.kits.rlhf.algorithms.distillation import Divergence, Heads, linear_divergence

ROWS, IDS = 11, 9
# Padded as Qwen2.5 of 0.5 and 7 billion weights are, in miniature.
STUDENT_IDS, TEACHER_IDS = 10, 13
BETAS = (1.0, 0.0, 0.5, 0.2)


def divergence(beta: float = 1.0, temperature: float = 0.7) -> Divergence:
    return Divergence(beta=beta, temperature=temperature, num_ids=IDS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Pair:
    """Hidden states and heads of a student and a teacher of another width and another padding."""

    def __init__(self, seed: int = 0) -> None:
        self.hidden, self.weight = random(ROWS, 5, seed=seed), random(STUDENT_IDS, 5, seed=seed + 1)
        self.others, self.other_weight = random(ROWS, 6, seed=seed + 2), random(TEACHER_IDS, 6, seed=seed + 3)
        self.row_weights = random(ROWS, seed=seed + 4).abs()
        self.sizes: list[int] = []

    def heads(self, student: Callable[[Tensor], Tensor]) -> Heads:
        return Heads(student=student, teacher=lambda rows: rows @ self.other_weight.t(), teacher_hidden=self.others)

    def found(self, what: Divergence) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss, statistics, and the gradients of hidden states and head."""
        sources = [each.clone().requires_grad_() for each in (self.hidden, self.weight)]

        def student(rows: Tensor) -> Tensor:
            self.sizes.append(len(rows))
            return rows @ sources[1].t()

        loss, statistics = linear_divergence(sources[0], sources[1], self.row_weights, self.heads(student), what)
        return loss.detach(), statistics, list(torch.autograd.grad(loss * 3, sources))


def plain(pair: Pair, what: Divergence) -> tuple[Tensor, list[Tensor]]:
    """Token by token, by the formulas of GKD."""
    hidden, weight = (each.clone().requires_grad_() for each in (pair.hidden, pair.weight))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        q = [math.e ** (weight[v] @ hidden[row] / what.temperature) for v in range(IDS)]
        p = [math.e ** (pair.other_weight[v] @ pair.others[row] / what.temperature) for v in range(IDS)]
        q, p = [each / sum(q) for each in q], [each / sum(p) for each in p]
        for one, other in zip(q, p, strict=True):
            mean = what.beta * other + (1 - what.beta) * one
            if what.beta == 1:
                loss = one * (one / other).log()
            elif what.beta == 0:
                loss = other * (other / one).log()
            else:
                loss = what.beta * other * (other / mean).log() + (1 - what.beta) * one * (one / mean).log()
            total = total + pair.row_weights[row] * loss
    return total.detach(), list(torch.autograd.grad(total * 3, [hidden, weight]))


def assert_close(found: Any, wanted: Any, atol: float = 1e-12) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("beta", BETAS)
def test_loss_and_gradient_equal_a_plain_loop_over_the_vocabulary(beta: float, temperature: float) -> None:
    what = divergence(beta, temperature)
    loss, statistics, gradients = (pair := Pair()).found(what)
    wanted, wanted_gradients = plain(pair, what)
    assert_close([loss, *gradients], [wanted, *wanted_gradients])
    for beta_of, row in ((1.0, 0), (0.0, 1)):
        assert_close([statistics[row] @ pair.row_weights], [plain(pair, replace(what, beta=beta_of))[0]])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("beta", BETAS)
def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient(beta: float, temperature: float) -> None:
    pair = Pair()
    pair.others, pair.other_weight = pair.hidden, pair.weight
    loss, statistics, gradients = pair.found(divergence(beta, temperature))
    assert max(float(each.abs().max()) for each in (loss, statistics[:2], *gradients)) < 1e-12
    assert statistics[2].tolist() == [1.0] * ROWS
    # TRL and slime had each of these: a shift by one token, and a teacher at another temperature.
    pair.other_weight = pair.weight.roll(1, 0)
    assert float(pair.found(divergence(beta, temperature))[0]) > 0.1
    pair.other_weight = pair.weight / temperature * 0.9
    assert float(pair.found(divergence(beta, temperature))[0]) > 1e-3


@pytest.mark.parametrize("beta", BETAS)
def test_padding_of_both_vocabularies_is_outside_of_both_softmaxes(beta: float) -> None:
    pair, other = Pair(), Pair()
    other.weight[IDS:], other.other_weight[IDS:] = 50.0, -torch.inf
    loss, _, gradients = pair.found(divergence(beta))
    again, _, changed = other.found(divergence(beta))
    # -inf times a probability of the student is a gradient of NaN beside a finite loss (TRL #5594).
    assert_close([again, changed[0], changed[1]], [loss, gradients[0], gradients[1]])
    assert changed[1][IDS:].abs().sum() == 0


@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_chunks_change_nothing_and_hold_so_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Pair().found(divergence())
    monkeypatch.setattr(distillation, "CHUNK_BYTES", 1)
    monkeypatch.setattr(distillation, "LEAST_ROWS", rows)
    found = (pair := Pair()).found(divergence())
    assert_close([found[0], found[1], *found[2]], [wanted[0], wanted[1], *wanted[2]])
    assert max(pair.sizes) == rows
    assert sum(pair.sizes) == ROWS


def test_only_what_is_trained_gets_a_gradient_and_no_graph_makes_none() -> None:
    pair = Pair()
    heads = pair.heads(lambda rows: rows @ pair.weight.t())
    hidden = pair.hidden.clone().requires_grad_()
    loss, statistics = linear_divergence(hidden, pair.weight, pair.row_weights, heads, divergence())
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert_close([gradient * 3], [Pair().found(divergence())[2][0]])
    assert not statistics.requires_grad
    with torch.no_grad():
        again, _ = linear_divergence(hidden, pair.weight, pair.row_weights, heads, divergence())
    assert not again.requires_grad
    assert again == loss


def test_a_second_derivative_is_refused() -> None:
    pair = Pair()
    hidden = pair.hidden.clone().requires_grad_()
    heads = pair.heads(lambda rows: rows @ pair.weight.t())
    loss, _ = linear_divergence(hidden, pair.weight, pair.row_weights, heads, divergence())
    with pytest.raises(ModelError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_half_precision_of_a_small_range_computes_in_fp32() -> None:
    pair = Pair()
    hidden, weight = pair.hidden.float().requires_grad_(), pair.weight.float().requires_grad_()
    heads = Heads(
        student=lambda rows: torch.nn.functional.linear(rows, weight),
        teacher=lambda rows: torch.nn.functional.linear(rows, pair.other_weight.float()),
        teacher_hidden=pair.others.float(),
    )
    with torch.autocast("cpu", torch.float16):
        # Gradients of single tokens in a long batch are below the range of fp16.
        loss, _ = linear_divergence(hidden, weight, pair.row_weights.float() * 1e-7, heads, divergence())
    found = torch.autograd.grad(loss * 3e7, [hidden, weight])
    assert torch.allclose(found[0].double(), Pair().found(divergence())[2][0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(found[1].double(), Pair().found(divergence())[2][1], rtol=1e-4, atol=1e-5)
