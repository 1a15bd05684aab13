"""Rows moved from anywhere to anywhere: both loops against plain indexing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.move_rows import numba as fast
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import poison
from tests.core.kernels.records import FAST, KERNELS, have_same_bits, normal, poisoned, seeded, threads

NUM_ROWS = 60


def places(count: int, seed: int) -> Tensor:
    return torch.randperm(NUM_ROWS, generator=seeded(seed))[:count]


@pytest.mark.parametrize("count", [0, 1, 23])
@pytest.mark.parametrize("width", [1, 7, 16, 35])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_arrive_bit_for_bit_and_no_other_changes(
    kernels: str, is_gathered: bool, is_scattered: bool, width: int, count: int
) -> None:
    source = normal(NUM_ROWS if is_gathered else count, width)
    target = poisoned(NUM_ROWS if is_scattered else count, width)
    # Counters in the bits of floats are often no numbers, which a sum with zero would change.
    source.view(torch.int32)[:, 0] = -1
    at, to = places(count, 0) if is_gathered else None, places(count, 1) if is_scattered else None
    expected = target.clone()
    expected[slice(None) if to is None else to] = source[slice(None) if at is None else at]
    poison()
    KERNELS[kernels].move_rows(source, target, at=at, to=to)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("at", "to"), [([0, 60], None), ([-1, 0], None), (None, [1, 60]), ([0, 1, 2], [0, 1]), ([0], [0, 1])]
)
def test_places_that_are_none_are_refused(kernels: str, at: list[int] | None, to: list[int] | None) -> None:
    given = [None if each is None else torch.tensor(each) for each in (at, to)]
    source = normal(NUM_ROWS if at is not None else 2, 3)
    with pytest.raises(ModelError):
        KERNELS[kernels].move_rows(source, torch.zeros(NUM_ROWS if to is not None else 2, 3), at=given[0], to=given[1])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_move_the_same(count: int) -> None:
    num_rows, width = 3 * fast.GRAIN // 7, 7
    source, target = normal(num_rows, width), poisoned(num_rows, width)
    order = torch.randperm(num_rows, generator=seeded(2))
    with threads(count):
        FAST.move_rows(source, target, at=order, to=order.flip(0))
    assert have_same_bits(target[order.flip(0)], source[order])
