import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.linear_log_probs.chunked import linear_log_probs
from kitforge.core.kernels.linear_log_probs.reference import linear_log_probs as reference
from tests.core.kernels.comparison import poison, random, relative

VOCAB, DIM = 11, 6


def operands(rows: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [random(rows, DIM, dtype=dtype), random(VOCAB, DIM, dtype=dtype)]


def targets_of(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows,), generator=torch.Generator().manual_seed(rows))


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
