"""Rows moved from anywhere to anywhere: both loops against plain indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.copy_rows import numba as fast
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import poison
from tests.core.kernels.records import FAST, KERNELS, have_same_bits, normal, poisoned, seeded, threads

NUM_ROWS = 60


def places(count: int, seed: int) -> Tensor:
    return torch.randperm(NUM_ROWS, generator=seeded(seed))[:count]


def check(kernels: str, is_gathered: bool, is_scattered: bool, width: int, count: int) -> None:
    """Whether rows arrive, whole, and no other changes."""
    source = normal(NUM_ROWS if is_gathered else count, width)
    target = poisoned(NUM_ROWS if is_scattered else count, width)
    # Counters are in the bits of floats: no numbers, or a zero below zero, which a sum with zero would change.
    source.view(torch.int32)[:, -1] = -1
    source.view(torch.int32)[:, 0] = -(2**31)
    at, to = places(count, 0) if is_gathered else None, places(count, 1) if is_scattered else None
    expected = target.clone()
    expected[slice(None) if to is None else to] = source[slice(None) if at is None else at]
    poison()
    KERNELS[kernels].copy_rows(source, target, at=at, to=to)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("count", [0, 1, 23])
@pytest.mark.parametrize("width", [1, 7, 16, 35])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_arrive_bit_for_bit_and_no_other_changes(
    kernels: str, is_gathered: bool, is_scattered: bool, width: int, count: int
) -> None:
    check(kernels, is_gathered, is_scattered, width, count)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("at", "to"), [([0, 60], None), ([-1, 0], None), (None, [1, 60]), ([0, 1, 2], [0, 1]), ([0], [0, 1])]
)
def test_places_that_are_none_are_refused(kernels: str, at: list[int] | None, to: list[int] | None) -> None:
    given = [None if each is None else torch.tensor(each) for each in (at, to)]
    source = normal(NUM_ROWS if at is not None else 2, 3)
    with pytest.raises(ModelError):
        KERNELS[kernels].copy_rows(source, torch.zeros(NUM_ROWS if to is not None else 2, 3), at=given[0], to=given[1])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_move_the_same(count: int) -> None:
    num_rows, width = 3 * fast.GRAIN // 7, 7
    source, target = normal(num_rows, width), poisoned(num_rows, width)
    order = torch.randperm(num_rows, generator=seeded(2))
    with threads(count):
        FAST.copy_rows(source, target, at=order, to=order.flip(0))
    assert have_same_bits(target[order.flip(0)], source[order])


Loop = Callable[..., None]


def plainly(source: Any, target: Any, at: Any, is_from_front: bool, *rest: Any) -> None:
    to, is_to_front, start, stop = rest
    for number in range(start, stop):
        target[number if is_to_front else to[number]] = source[number if is_from_front else at[number]]


def the_last_row_is_left(source: Any, target: Any, *places: Any) -> None:
    plainly(source, target, *places[:-1], places[-1] - 1)


def the_last_column_is_left(source: Any, target: Any, *places: Any) -> None:
    plainly(source[:, :-1], target[:, :-1], *places)


def rows_come_from_the_front(source: Any, target: Any, at: Any, _: bool, *rest: Any) -> None:
    plainly(source, target, at, True, *rest)


def rows_go_to_the_front(source: Any, target: Any, at: Any, is_from_front: bool, *rest: Any) -> None:
    plainly(source, target, at, is_from_front, rest[0], True, *rest[2:])


def rows_are_added(source: Any, target: Any, at: Any, _: bool, *rest: Any) -> None:
    to, _, start, stop = rest
    target[to[start:stop]] = 0
    target[to[start:stop]] += source[at[start:stop]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        the_last_row_is_left,
        the_last_column_is_left,
        rows_come_from_the_front,
        rows_go_to_the_front,
        rows_are_added,
    ],
)
def test_a_planted_fault_is_seen(fault: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_copy", plainly)
    check("fast", True, True, 7, 23)
    monkeypatch.setattr(fast, "_copy", fault)
    with pytest.raises(AssertionError):
        check("fast", True, True, 7, 23)
