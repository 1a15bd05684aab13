"""Rows of a file: both loops against the tensor that was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import poison
from tests.core.kernels.records import KERNELS, normal, poisoned, seeded

NUM_ROWS, WIDTH = 60, 7
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
def test_places_that_are_none_are_refused(kernels: str, opened: Opened) -> None:
    with pytest.raises(ModelError):
        KERNELS[kernels].pread_rows(opened[0], torch.empty(2, WIDTH), torch.arange(2), torch.tensor([0, 2]))
