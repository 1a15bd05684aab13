import math
from functools import partial

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.random_sample.reference import random_sample as reference
from tests.core.kernels.comparison import poison, random

numba = pytest.importorskip("kitforge.core.kernels.random_sample.numba")
triton = pytest.importorskip("kitforge.core.kernels.random_sample.triton")
# NaN is what some tests are about, and numpy, which interprets Triton, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Numbers that fill no lanes, no block, one block, and many.
SIZES = [1, 5, numba.BLOCK - 1, numba.BLOCK, numba.BLOCK + 1, 49152]
LAST = 1 - 2.0**-32
KERNELS = {"numba": numba.random_sample, "triton": triton.random_sample}


@pytest.fixture(autouse=True, params=KERNELS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the kernel that `found` calls; on a CPU, Triton's blocks would hold whole rows."""
    monkeypatch.setattr(triton, "logits_tiles", lambda logits: (len(logits), numba.BLOCK))
    monkeypatch.setitem(KERNELS, "tested", KERNELS[request.param])
    return str(request.param)


def found(logits: Tensor, points: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    poison()
    with torch.no_grad():
        result: tuple[Tensor, Tensor] = KERNELS["tested"](logits, points, temperature)
    return result


def repeated(row: list[float] | Tensor, points: Tensor) -> Tensor:
    return torch.as_tensor(row).float().expand(len(points), -1).contiguous()


def shares(logits: Tensor, temperature: float) -> Tensor:
    """Ends [rows, vocab + 1] of the intervals of points that draw each index."""
    ends = torch.softmax((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature, -1).cumsum(-1)
    return torch.cat([torch.zeros(len(logits), 1, dtype=torch.float64), ends / ends[:, -1:]], -1)


@pytest.mark.parametrize("temperature", [1e-300, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_reference(name: str, size: int, temperature: float) -> None:
    # Triton's interpreter takes a millisecond for a block of each row.
    size, rows = (size, 12) if name == "numba" else (min(size, 2 * numba.BLOCK + 7), 3)
    logits = (3 * random(rows, size)).float()
    points = torch.tensor([0, LAST, *(random(rows - 2, seed=size) % 1)], dtype=torch.float64)
    tokens, logprobs = found(logits, points, temperature)
    wanted, exact = reference(logits.double(), points, max(temperature, 1e-38))
    assert tokens.tolist() == wanted.tolist()
    assert logprobs.tolist() == pytest.approx(exact.tolist(), rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("size", SIZES[:-1] + [3 * numba.BLOCK + 5])
def test_every_token_has_its_share_of_the_points(name: str, size: int) -> None:
    """The point in the middle of each interval draws its index, so no interval is lost, moved or shared."""
    logits = (0.5 * random(1, size)).float()
    ends = shares(logits, 0.7)[0]
    tokens = [each for each in range(size) if name == "numba" or min(each % numba.BLOCK, -each % numba.BLOCK) < 5]
    points = (ends[1:] + ends[:-1])[tokens] / 2
    assert found(repeated(logits[0], points), points, 0.7)[0].tolist() == tokens


def test_draws_at_points_of_a_grid_follow_the_softmax(name: str) -> None:
    # Triton's interpreter takes a millisecond for a point.
    logits, count = (2 * random(1, 2500)).float(), 20_000 if name == "numba" else 30
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = torch.cat([found(repeated(logits[0], part), part, 1.3)[0] for part in points.split(2000)])
    counts = torch.bincount(tokens, minlength=2500).double()
    assert float((counts - count * shares(logits, 1.3)[0].diff()).abs().max()) < 1.01


def test_a_point_at_the_end_of_an_interval_draws_the_next_token() -> None:
    points = torch.tensor([0, 0.25, 0.5, 0.75]).double()
    for logits in (torch.zeros(4), torch.zeros(4 * numba.BLOCK)):
        expected = [len(logits) // 4 * place for place in range(4)]
        assert found(repeated(logits, points), points)[0].tolist() == expected
        assert reference(repeated(logits, points), points, 1.0)[0].tolist() == expected


def test_the_last_token_of_a_block_does_not_pay_for_rounding() -> None:
    """Its share is smaller than the rounding of the total of its block in single precision."""
    logits = torch.full((2 * numba.BLOCK,), -0.1)
    logits[0], logits[-1] = 0, -10
    share = float(torch.softmax(logits.double(), 0)[-1])
    points = 1 - share * torch.tensor([3, 1.5, 0.75, 0.25]).double()
    last = len(logits) - 1
    assert found(repeated(logits, points), points)[0].tolist() == [last - 1, last - 1, last, last]


@pytest.mark.parametrize("temperature", [1e-300, 0.3, 5.0])
def test_excluded_tokens_are_never_drawn(name: str, temperature: float) -> None:
    block = numba.BLOCK
    logits = torch.zeros(5 * block)
    # The start, a whole block, one at each side of a boundary, and the end.
    for first, count in ((0, block + 7), (2 * block, block), (4 * block - 1, 2), (5 * block - 70, 70)):
        logits[first : first + count] = -math.inf
    count = 4001 if name == "numba" else 3
    points = torch.cat([torch.tensor([0, LAST, 1 - 2.0**-53]).double(), (torch.arange(count) / count).double()])
    tokens, logprobs = found(repeated(logits, points), points, temperature)
    assert logits[tokens].tolist() == [0.0] * len(points)
    assert tokens[:3].tolist() == [block + 7, *[5 * block - 71] * 2]
    assert logprobs.tolist() == pytest.approx([-math.log(int((logits == 0).sum()))] * len(points))


@pytest.mark.parametrize("far", [90.0, 1e30])
def test_tokens_too_unlikely_for_their_precision_are_not_drawn_either(far: float) -> None:
    points = torch.tensor([0, 0.5, LAST]).double()
    tokens, logprobs = found(repeated([-far, far, -far], points), points)
    assert (tokens.tolist(), logprobs.tolist()) == ([1, 1, 1], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("place", [0, 70, 2047, 2144])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none_shows_in_its_row_only(number: float, place: int) -> None:
    logits, points = random(3, 2145).float(), torch.tensor([0.2, LAST, 0.7]).double()
    logits[1, place] = number
    tokens, logprobs = found(logits, points, 0.5)
    assert logprobs.isnan().tolist() == reference(logits, points, 0.5)[1].isnan().tolist() == [False, True, False]
    assert 0 <= int(tokens[1]) < 2145


@pytest.mark.parametrize("size", [1, 5, 2145])
def test_a_row_without_tokens_has_no_probability(size: int) -> None:
    tokens, logprobs = found(torch.full((2, size), -math.inf), torch.tensor([0, LAST]).double())
    assert logprobs.isnan().all() and bool(((tokens >= 0) & (tokens < size)).all())


@torch.no_grad()
def test_a_row_has_its_bits_beside_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba, "GRAIN", 1)
    monkeypatch.setattr("kitforge.core.kernels.cpu_engine.numba_runtime.num_threads", lambda: 3)
    logits, points = random(9, 2145).float(), torch.rand(9, generator=torch.Generator().manual_seed(3)).double()
    alone = [found(logits[row : row + 1].clone(), points[row : row + 1], 0.8) for row in range(9)]
    together = found(logits, points, 0.8)
    for place, wanted in enumerate(zip(*alone, strict=True)):
        assert torch.equal(together[place], torch.cat(wanted))


@pytest.mark.parametrize("guard", [torch.no_grad, partial(torch.inference_mode, True)])
def test_other_dtypes_and_strides_are_taken_too(guard: partial[torch.inference_mode]) -> None:
    kernel, points = select("O1").random_sample, torch.tensor([[0.1, 0.4, 0.6, 0.9], [0.0] * 4]).double().t()[:, 0]
    with guard():
        logits = random(4, 90)
        assert torch.equal(kernel(logits, points, 0.7)[1], reference(logits, points, 0.7)[1])
        strided = random(90, 4).float().t()
        assert torch.equal(kernel(strided, points, 0.7)[0], reference(strided, points, 0.7)[0])
    assert kernel(random(0, 90).float(), points[:0], 1.0)[0].shape == (0,)
