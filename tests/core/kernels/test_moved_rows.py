"""Rows that are copied, exchanged, or read from a file: both loops against plain indexing."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.copy_rows import numba as copy
from kitforge.core.kernels.swap_rows import numba as swap
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
    """Counters are in the bits of floats: no numbers, or a zero below zero, which a sum with zero would change."""
    source = normal(NUM_ROWS if is_gathered else count, width)
    target = poisoned(NUM_ROWS if is_scattered else count, width)
    source.view(torch.int32)[:, -1] = -1
    source.view(torch.int32)[:, 0] = -(2**31)
    at, to = places(count, 0) if is_gathered else None, places(count, 1) if is_scattered else None
    expected = target.clone()
    expected[slice(None) if to is None else to] = source[slice(None) if at is None else at]
    poison()
    KERNELS[kernels].copy_rows(source, target, at=at, to=to)
    assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("at", "to"), [([0, 60], None), ([-1, 0], None), (None, [1, 60]), ([0, 1, 2], [0, 1]), ([0], [0, 1])]
)
def test_places_that_are_none_are_refused_copies(kernels: str, at: list[int] | None, to: list[int] | None) -> None:
    given = [None if each is None else torch.tensor(each) for each in (at, to)]
    source = normal(NUM_ROWS if at is not None else 2, 3)
    with pytest.raises(ModelError):
        KERNELS[kernels].copy_rows(source, torch.zeros(NUM_ROWS if to is not None else 2, 3), at=given[0], to=given[1])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_move_the_same(count: int) -> None:
    num_rows, width = 3 * copy.GRAIN // 7, 7
    source, target = normal(num_rows, width), poisoned(num_rows, width)
    order = torch.randperm(num_rows, generator=seeded(2))
    with threads(count):
        FAST.copy_rows(source, target, at=order, to=order.flip(0))
    assert have_same_bits(target[order.flip(0)], source[order])


@pytest.mark.parametrize("count", [0, 1, 23, NUM_ROWS])
@pytest.mark.parametrize("width", [1, 7, 16, 35])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_change_places_bit_for_bit_and_no_other_changes(kernels: str, width: int, count: int) -> None:
    slabs = [normal(NUM_ROWS, width, seed=seed) for seed in (0, 1)]
    # Counters in the bits of floats are often no numbers, which a sum with zero would change.
    for slab in slabs:
        slab.view(torch.int32)[:, -1] = -1 - torch.arange(NUM_ROWS, dtype=torch.int32)
    at, to = (torch.randperm(NUM_ROWS, generator=seeded(seed))[:count] for seed in (2, 3))
    expected = [slab.clone() for slab in slabs]
    expected[0][at], expected[1][to] = slabs[1][to], slabs[0][at]
    poison()
    KERNELS[kernels].swap_rows(*slabs, at, to)
    for slab, other in zip(slabs, expected, strict=True):
        assert torch.equal(slab.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("at", "to"), [([0, 60], [0, 1]), ([0, 1], [-1, 0]), ([0, 1], [0])])
def test_places_that_are_none_are_refused_exchanges(kernels: str, at: list[int], to: list[int]) -> None:
    with pytest.raises(ModelError):
        KERNELS[kernels].swap_rows(normal(60, 3), normal(60, 3), torch.tensor(at), torch.tensor(to))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_exchange_the_same(count: int) -> None:
    num_rows, width = 4 * swap.GRAIN // 7, 7
    one, other = normal(num_rows, width), normal(num_rows, width, seed=1)
    order = torch.randperm(num_rows, generator=seeded(2))
    expected = one.clone(), other.clone()
    with threads(count):
        FAST.swap_rows(one, other, order, order.flip(0))
    assert torch.equal(one[order], expected[1][order.flip(0)])
    assert torch.equal(other[order.flip(0)], expected[0][order])


WIDTH = 7
Opened = tuple[int, Tensor]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    rows = normal(NUM_ROWS, WIDTH)
    (tmp_path / "rows").write_bytes(rows.numpy().tobytes())
    file = os.open(tmp_path / "rows", os.O_RDWR)
    yield file, rows
    os.close(file)


@pytest.mark.parametrize("count", [0, 1, 23, NUM_ROWS])
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_arrive_and_no_other_changes(kernels: str, count: int, opened: Opened) -> None:
    file, rows = opened
    at, to = (torch.randperm(NUM_ROWS, generator=seeded(seed))[:count] for seed in (0, 1))
    out = poisoned(NUM_ROWS, WIDTH)
    expected = out.clone()
    expected[to] = rows[at]
    poison()
    assert KERNELS[kernels].pread_rows(file, out, at, to) == count
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_behind_the_end_or_of_no_file_are_not_counted(kernels: str, opened: Opened) -> None:
    file, rows = opened
    os.ftruncate(file, 4 * WIDTH * 40 + 5)
    places, out = torch.arange(NUM_ROWS), torch.empty(NUM_ROWS, WIDTH)
    assert KERNELS[kernels].pread_rows(file, out, places, places) == 40
    assert torch.equal(out[:40], rows[:40])
    assert KERNELS[kernels].pread_rows(-1, out, places, places) == 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_places_that_are_none_are_refused_reads(kernels: str, opened: Opened) -> None:
    with pytest.raises(ModelError):
        KERNELS[kernels].pread_rows(opened[0], torch.empty(2, WIDTH), torch.arange(2), torch.tensor([0, 2]))
