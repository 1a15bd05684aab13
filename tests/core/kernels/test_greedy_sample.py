import math

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.greedy_sample.reference import greedy_sample as reference
from tests.core.kernels.comparison import poison, random

numba = pytest.importorskip("kitforge.core.kernels.greedy_sample.numba")
triton = pytest.importorskip("kitforge.core.kernels.greedy_sample.triton")
# NaN is what some tests are about, and numpy, which interprets Triton, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Numbers that fill no lanes and no block, one block, and several with a rest.
SIZES = [1, 5, 63, 64, numba.BLOCK, numba.BLOCK + 1, 2 * numba.BLOCK + 97]
KERNELS = {"numba": numba.greedy_sample, "triton": triton.greedy_sample}


@pytest.fixture(autouse=True, params=KERNELS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the kernel that `found` calls; on a CPU, Triton's blocks would hold whole rows."""
    monkeypatch.setattr(triton, "logits_tiles", lambda logits: (len(logits), numba.BLOCK))
    monkeypatch.setitem(KERNELS, "tested", KERNELS[request.param])
    return str(request.param)


def found(logits: Tensor) -> tuple[Tensor, Tensor]:
    poison()
    with torch.no_grad():
        result: tuple[Tensor, Tensor] = KERNELS["tested"](logits)
    return result


@pytest.mark.parametrize("scale", [1e-3, 1.0, 40.0, 1e30])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_reference(size: int, scale: float) -> None:
    logits = (scale * random(7, size)).float()
    (tokens, logprobs), (wanted, exact) = found(logits), reference(logits.double())
    assert tokens.tolist() == wanted.tolist()
    assert logprobs.tolist() == pytest.approx(exact.tolist(), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("places", [(3, 9), (40, 1100), (1024, 2100), (2048, 2144)], ids=str)
def test_the_first_of_equal_numbers_is_taken(places: tuple[int, int]) -> None:
    logits = torch.zeros(2, SIZES[-1])
    logits[1, list(places)] = 1.0
    assert found(logits)[0].tolist() == [0, places[0]]


@pytest.mark.parametrize("place", [0, 70, 2047, 2144])
def test_a_number_that_is_none_shows_in_its_row_only(place: int) -> None:
    logits = random(3, SIZES[-1]).float()
    logits[1, place] = float("nan")
    logprobs = found(logits)[1]
    assert logprobs.isnan().tolist() == [False, True, False]


def test_excluded_tokens_have_no_part() -> None:
    logits = torch.full((2, SIZES[-1]), -math.inf)
    logits[0, [17, 2100]] = torch.tensor([0.5, 0.5])
    tokens, logprobs = found(logits)
    assert (int(tokens[0]), float(logprobs[0])) == (17, pytest.approx(-math.log(2)))
    assert logprobs[1].isnan()


@torch.no_grad()
def test_a_row_has_its_bits_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "GRAIN", 1)
    monkeypatch.setattr("kitforge.core.kernels.cpu_engine.numba_runtime.num_threads", lambda: 3)
    logits = random(9, SIZES[-1]).float()
    alone = [found(row.unsqueeze(0).clone()) for row in logits]
    together = found(logits)
    for place, wanted in enumerate(zip(*alone, strict=True)):
        assert torch.equal(together[place], torch.cat(wanted))


@torch.no_grad()
def test_other_dtypes_and_strides_are_taken_too() -> None:
    logits = random(4, 90)
    kernel = select("O1").greedy_sample
    assert torch.equal(kernel(logits)[1], reference(logits)[1])
    strided = random(90, 4).float().t()
    assert torch.equal(kernel(strided)[0], strided.argmax(-1))
