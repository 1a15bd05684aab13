"""Rows of two slabs that change places: both loops against plain indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.swap_rows import numba as fast
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import poison
from tests.core.kernels.records import FAST, KERNELS, normal, seeded, threads

NUM_ROWS = 60


def bits_of(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)


def check(kernels: str, width: int, count: int, num_rows: int = NUM_ROWS) -> None:
    """Whether an exchange moves these rows, whole, and no other."""
    slabs = [normal(num_rows, width, seed=seed) for seed in (0, 1)]
    # Counters in the bits of floats are often no numbers, which a sum with zero would change.
    for slab in slabs:
        bits_of(slab)[:, -1] = -1 - torch.arange(num_rows, dtype=torch.int32)
    at, to = (torch.randperm(num_rows, generator=seeded(seed))[:count] for seed in (2, 3))
    expected = [slab.clone() for slab in slabs]
    expected[0][at], expected[1][to] = slabs[1][to], slabs[0][at]
    poison()
    KERNELS[kernels].swap_rows(*slabs, at, to)
    for slab, other in zip(slabs, expected, strict=True):
        assert torch.equal(bits_of(slab), bits_of(other))


@pytest.mark.parametrize("count", [0, 1, 23, NUM_ROWS])
@pytest.mark.parametrize("width", [1, 7, 16, 35])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_change_places_bit_for_bit_and_no_other_changes(kernels: str, width: int, count: int) -> None:
    check(kernels, width, count)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("at", "to"), [([0, 60], [0, 1]), ([0, 1], [-1, 0]), ([0, 1], [0])])
def test_places_that_are_none_are_refused(kernels: str, at: list[int], to: list[int]) -> None:
    with pytest.raises(ModelError):
        KERNELS[kernels].swap_rows(normal(60, 3), normal(60, 3), torch.tensor(at), torch.tensor(to))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_exchange_the_same(count: int) -> None:
    num_rows, width = 4 * fast.GRAIN // 7, 7
    one, other = normal(num_rows, width), normal(num_rows, width, seed=1)
    order = torch.randperm(num_rows, generator=seeded(2))
    expected = one.clone(), other.clone()
    with threads(count):
        FAST.swap_rows(one, other, order, order.flip(0))
    assert torch.equal(one[order], expected[1][order.flip(0)])
    assert torch.equal(other[order.flip(0)], expected[0][order])


def one_way(one: Any, other: Any, at: Any, to: Any, start: int, stop: int) -> None:
    for number in range(start, stop):
        one[at[number]] = other[to[number]]


def the_last_column_stays(one: Any, other: Any, at: Any, to: Any, start: int, stop: int) -> None:
    for number in range(start, stop):
        kept = one[at[number], :-1].copy()
        one[at[number], :-1] = other[to[number], :-1]
        other[to[number], :-1] = kept


def the_last_pair_stays(one: Any, other: Any, at: Any, to: Any, start: int, stop: int) -> None:
    _plainly(one, other, at, to, start, stop - 1)


def the_wrong_way_round(one: Any, other: Any, at: Any, to: Any, start: int, stop: int) -> None:
    _plainly(one, other, to, at, start, stop)


def _plainly(one: Any, other: Any, at: Any, to: Any, start: int, stop: int) -> None:
    for number in range(start, stop):
        kept = one[at[number]].copy()
        one[at[number]] = other[to[number]]
        other[to[number]] = kept


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one_way, the_last_column_stays, the_last_pair_stays, the_wrong_way_round])
def test_a_planted_fault_is_seen(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fast, "_swap", _plainly)
        check("fast", 7, 23)
    monkeypatch.setattr(fast, "_swap", fault)
    with pytest.raises(AssertionError):
        check("fast", 7, 23)
