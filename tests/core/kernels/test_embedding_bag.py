"""Rows of a slab, as they are or pooled by bags, and the way of gradients back: both loops against definitions."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kitforge.core.kernels.cpu_engine import numba_runtime as compiling
from kitforge.core.kernels.dispatch import TABLE_REFERENCE, TableKernels
from kitforge.core.kernels.embedding_bag import numba as fast_gather
from kitforge.core.kernels.embedding_bag_backward import numba as fast_sum
from kitforge.core.kernels.tables.bags import Bags
from kitforge.foundation.errors import DataError, ModelError
from tests.core.kernels.comparison import poison
from tests.core.kernels.records import FAST, KERNELS, have_same_bits, normal, poisoned, seeded, threads

NUM_ROWS, NUM_SLOTS = 50, 20
DTYPES = [torch.float32, torch.float64]
# Bags of all kinds: empty ones at both ends and between, of one id, of many.
LENGTHS = [0, 3, 1, 0, 0, 17, 2, 1, 40, 0]
KINDS = ["rows", "sum", "mean", "weighted sum", "weighted mean"]


def bags_of(kind: str, lengths: list[int], dtype: torch.dtype) -> Bags | None:
    if kind == "rows":
        return None
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    weights = normal(sum(lengths), dtype=dtype, seed=5) if kind.startswith("weighted") else None
    return Bags(offsets=offsets, mode="mean" if kind.endswith("mean") else "sum", weights=weights)


def slots_and_inverse(num_ids: int) -> tuple[Tensor, Tensor]:
    slots = torch.randperm(NUM_ROWS, generator=seeded(1))[:NUM_SLOTS]
    return slots, torch.randint(0, NUM_SLOTS, (num_ids,), generator=seeded(2)).pow(2) // NUM_SLOTS


def forward_and_back(
    kernels: TableKernels, kind: str, dim: int, dtype: torch.dtype, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """The output, and what a gradient of it gives the distinct rows, both into poisoned memory."""
    slab, bags = normal(NUM_ROWS, dim + 3, dtype=dtype), bags_of(kind, lengths, dtype)
    # What lies beside the embedding is no number, and must not be read as one.
    slab[:, dim:] = torch.nan
    slots, inverse = slots_and_inverse(sum(lengths))
    num_out = sum(lengths) if bags is None else len(lengths)
    out = poisoned(num_out, dim, dtype=dtype)
    poison()
    assert kernels.embedding_bag(slab, slots, dim, inverse=inverse, bags=bags, out=out) is out
    gradients, sums = normal(num_out, dim, dtype=dtype, seed=3), poisoned(NUM_SLOTS, dim, dtype=dtype)
    assert kernels.embedding_bag_backward(gradients, inverse, NUM_SLOTS, bags=bags, out=sums) is sums
    return out, sums


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0], []], ids=["ragged", "empty_bags", "no_bags"])
@pytest.mark.parametrize("dim", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_has_the_bits_of_the_reference(kind: str, dtype: torch.dtype, dim: int, lengths: list[int]) -> None:
    wanted = forward_and_back(TABLE_REFERENCE, kind, dim, dtype, lengths)
    assert all(map(have_same_bits, forward_and_back(FAST, kind, dim, dtype, lengths), wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_too_many_to_keep_near_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near = forward_and_back(FAST, kind, 7, torch.float32, LENGTHS)
    monkeypatch.setattr(fast_gather, "CACHED_BYTES", 0)
    assert all(map(have_same_bits, forward_and_back(FAST, kind, 7, torch.float32, LENGTHS), near))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_is_what_torch_computes_for_a_bag(kind: str, kernels: str) -> None:
    dim, dtype = 7, torch.float64
    found = forward_and_back(KERNELS[kernels], kind, dim, dtype, LENGTHS)
    slots, inverse = slots_and_inverse(sum(LENGTHS))
    rows = normal(NUM_ROWS, dim + 3, dtype=dtype)[slots, :dim].requires_grad_()
    bags = bags_of(kind, LENGTHS, dtype)
    if bags is None:
        output = rows[inverse]
    elif bags.weights is not None and bags.mode == "mean":
        # torch has no such bag: a mean divides by the number of ids, whatever they weigh.
        sums = F.embedding_bag(inverse, rows, bags.offsets[:-1], mode="sum", per_sample_weights=bags.weights)
        output = sums / torch.tensor(LENGTHS).clamp(min=1).unsqueeze(1)
    else:
        output = F.embedding_bag(inverse, rows, bags.offsets[:-1], mode=bags.mode, per_sample_weights=bags.weights)
    output.backward(normal(*output.shape, dtype=dtype, seed=3))
    for one, other in zip(found, (output.detach(), rows.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernels", KERNELS)
def test_slots_may_come_without_places(kernels: str) -> None:
    slab, slots = normal(NUM_ROWS, 6), torch.tensor([4, 4, 49, 0])
    gathered = KERNELS[kernels].embedding_bag(slab, slots, 4)
    assert torch.equal(gathered, slab[slots, :4])
    bags = Bags(offsets=torch.tensor([0, 3, 4]))
    pooled = KERNELS[kernels].embedding_bag(slab, slots, 4, bags=bags)
    assert torch.equal(pooled, torch.stack([slab[4, :4] + slab[4, :4] + slab[49, :4], slab[0, :4]]))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_gather, "GRAIN", 16)
    monkeypatch.setattr(fast_sum, "GRAIN", 16)
    outcomes = []
    for count in (1, 2, 3, 7):
        with threads(count):
            outcomes.append(forward_and_back(FAST, kind, 5, torch.float32, LENGTHS))
    # A prefetcher that begins between two questions for the number of threads leaves fewer of them.
    monkeypatch.setattr(compiling, "num_threads", lambda: 2)
    with threads(5):
        outcomes.append(forward_and_back(FAST, kind, 5, torch.float32, LENGTHS))
    assert all(all(map(have_same_bits, outcome, outcomes[0])) for outcome in outcomes)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_is_added_up_in_the_order_of_its_ids(kernels: str) -> None:
    # ((2^60 + 1) - 2^60) + 1 in float32 is 1; in any other order it is 0 or 2.
    gradients = torch.tensor([2.0**60, 1.0, -(2.0**60), 1.0]).unsqueeze(1)
    inverse = torch.tensor([1, 1, 1, 1])
    assert KERNELS[kernels].embedding_bag_backward(gradients, inverse, 2).tolist() == [[0.0], [1.0]]
    assert KERNELS[kernels].embedding_bag_backward(gradients.flip(0), inverse, 2).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_finite_stays_in_its_row(kernels: str) -> None:
    gradients = torch.ones(4, 2)
    gradients[1, 0], gradients[2, 1] = torch.nan, torch.inf
    sums = KERNELS[kernels].embedding_bag_backward(gradients, torch.tensor([0, 1, 2, 0]), 3)
    assert sums.isfinite().tolist() == [[True, True], [False, True], [True, False]]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_place_outside_is_refused(kernels: str) -> None:
    slab, bags = torch.zeros(5, 4), Bags(offsets=torch.tensor([0, 3]))
    gather, add = KERNELS[kernels].embedding_bag, KERNELS[kernels].embedding_bag_backward
    for slot in (-1, 5):
        with pytest.raises(ModelError, match="slots of the slab"):
            gather(slab, torch.tensor([0, slot]), 2)
    with pytest.raises(ModelError, match="indices of the slots"):
        gather(slab, torch.tensor([0, 1]), 2, inverse=torch.tensor([2]))
    with pytest.raises(ModelError, match="indices of the rows"):
        add(torch.zeros(2, 2), torch.tensor([0, 3]), 3)
    with pytest.raises(DataError, match="another number of ids"):
        gather(slab, torch.tensor([0, 1]), 2, bags=bags)
    with pytest.raises(DataError, match="another number of ids"):
        add(torch.zeros(1, 2), torch.tensor([0, 1]), 3, bags=bags)


def test_gradients_may_be_views() -> None:
    spread, inverse = normal(6, 3).t().contiguous().t(), torch.tensor([0, 1, 0, 1, 1, 0])
    expected = FAST.embedding_bag_backward(spread.contiguous(), inverse, 2)
    assert have_same_bits(FAST.embedding_bag_backward(spread, inverse, 2), expected)
    assert have_same_bits(
        FAST.embedding_bag_backward(torch.ones(1, 1).expand(6, 3), inverse, 2), torch.full((2, 3), 3.0)
    )
