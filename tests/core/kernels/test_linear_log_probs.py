from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels import vocabulary
from kitforge.core.kernels.linear_log_probs import chunked
from kitforge.core.kernels.linear_log_probs.chunked import linear_log_probs
from kitforge.core.kernels.linear_log_probs.reference import linear_log_probs as reference
from kitforge.core.kernels.vocabulary import VocabularyShard
from tests.core.kernels.comparison import TOLERANCE, autocast, distance, in_parts, poison, random, relative

VOCAB, DIM = 11, 6


def operands(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [random(rows, DIM, dtype=dtype), random(VOCAB, DIM, dtype=dtype)]


def targets_of(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))


def both(kernel: object, hidden: Tensor, weight: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Both results in one tensor, so that each has a gradient of its own."""
    assert callable(kernel)
    return torch.stack(kernel(hidden, weight, targets_of(hidden.shape[0]), temperature))


@pytest.fixture
def rows_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of so many rows of float64 logits."""
    monkeypatch.setattr(vocabulary, "CHUNK_BYTES", request.param * VOCAB * 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_it_is_its_reference(rows: int, temperature: float, dtype: torch.dtype) -> None:
    kernels = (partial(both, each, temperature=temperature) for each in (linear_log_probs, reference))
    assert distance(*kernels, operands(rows, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kept", [0, 2**30])
@pytest.mark.parametrize("rows_at_once", [0, 1, 3, 7], indirect=True)
def test_neither_chunks_nor_what_is_kept_change_a_result(
    rows_at_once: None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "KEPT_BYTES", kept)
    assert distance(partial(both, linear_log_probs), partial(both, reference), operands(7)) < 1e-12


def test_under_autocast_it_rounds_like_its_reference(native: bool) -> None:
    kernels = (autocast(partial(both, each)) for each in (linear_log_probs, reference))
    assert distance(*kernels, operands(7, torch.float32)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("wants", [0, 1])
@pytest.mark.parametrize("used", [0, 1])
def test_only_gradients_that_are_wanted_are_found(wants: int, used: int) -> None:
    found = []
    for kernel in (linear_log_probs, reference):
        inputs = operands(5)
        inputs[wants].requires_grad_()
        poison()
        kernel(*inputs, targets_of(5))[used].sum().backward()
        assert inputs[1 - wants].grad is None
        found.append(inputs[wants].grad)
    assert relative(found[0], found[1]) < 1e-12  # type: ignore[arg-type]


def test_entropies_lie_between_certainty_and_chance() -> None:
    certain, even = torch.zeros(1, DIM), torch.zeros(1, DIM)
    certain[0, 0] = 100.0
    _, entropies = linear_log_probs(torch.cat([certain, even]), torch.eye(VOCAB, DIM), torch.tensor([0, 0]))
    assert float(entropies[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(entropies[1]) == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=1e-6)


def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        linear_log_probs(*operands(1), torch.tensor([VOCAB]))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rows", [0, 7])
def test_parts_of_a_vocabulary_give_the_whole(rows: int, temperature: float) -> None:
    hidden, weight = (each.requires_grad_() for each in operands(rows))
    wanted = torch.stack(reference(hidden, weight, targets_of(rows), temperature))
    upstream = random(2, rows)
    grads = torch.autograd.grad(wanted, [hidden, weight], upstream)

    def held(part: Tensor, share: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
        own = [hidden.detach().clone().requires_grad_(), part]
        found = torch.stack(linear_log_probs(*own, targets_of(rows), temperature, shard=share))
        return found.detach(), *torch.autograd.grad(found, own, upstream)

    # Uneven parts, the last of them empty.
    results, of_hidden, of_weight = zip(*in_parts([5, 1, 5, 0], weight, held), strict=True)
    for result in results:
        torch.testing.assert_close(result, wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack(of_hidden).sum(0), grads[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(of_weight), grads[1], rtol=0, atol=1e-12)
