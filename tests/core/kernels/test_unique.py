"""Distinct ids in the order in which they first occur."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.core.kernels.cpu_engine import numba_runtime as compiling
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.kernels.unique import numba as fast
from tests.core.kernels.records import EXTREME, FAST, KERNELS, poisoned, seeded, skewed, threads


def by_dict(ids: list[int]) -> tuple[list[int], list[int]]:
    numbers: dict[int, int] = {}
    inverse = [numbers.setdefault(id, len(numbers)) for id in ids]
    return list(numbers), inverse


def dirty() -> Workspace:
    """Working memory in which others have been at work."""
    scratch = Workspace()
    scratch.take("unique.tables", 2**16, dtype=torch.int32).fill_(77)
    scratch.take("unique.distinct", 2**12, dtype=torch.int64).fill_(5)
    scratch.take("unique.new_numbers", 2**12, dtype=torch.int32).fill_(99)
    return scratch


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.sampled_from(EXTREME) | st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=300))
def test_numbers_ids_as_a_dict_would(kernels: str, ids: list[int]) -> None:
    out = poisoned(len(ids), dtype=torch.int64)
    distinct, inverse = KERNELS[kernels].unique(torch.tensor(ids, dtype=torch.int64), out, dirty())
    assert inverse is out
    assert (distinct.tolist(), inverse.tolist()) == by_dict(ids)


BATCHES = {
    "skewed": skewed(3000),
    "all distinct": torch.randperm(3000, generator=seeded(2)) - 1500,
    "all equal": torch.full((3000,), -1),
    "new ones at the end": torch.cat([torch.zeros(2000, dtype=torch.int64), torch.arange(1000)]),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_pieces_of_threads_join_as_one(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "GRAIN", 1000)
    with threads(count):
        distinct, inverse = FAST.unique(BATCHES[name], None, dirty())
    assert (distinct.tolist(), inverse.tolist()) == by_dict(BATCHES[name].tolist())


@pytest.mark.parametrize("name", BATCHES)
def test_pieces_for_more_threads_than_there_are_by_then(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefetcher may begin between two questions for the number of threads."""
    monkeypatch.setattr(fast, "GRAIN", 1000)
    monkeypatch.setattr(compiling, "num_threads", lambda: 2)
    with threads(5):
        distinct, inverse = FAST.unique(BATCHES[name], None, dirty())
    assert (distinct.tolist(), inverse.tolist()) == by_dict(BATCHES[name].tolist())


@pytest.mark.parametrize("count", [1, 3])
def test_a_table_that_proves_too_small_is_taken_larger(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    tried = fast._try

    def listen(ids: object, distinct: object, inverse: object, size: int, scratch: Workspace) -> int:
        sizes.append(size)
        return tried(ids, distinct, inverse, size // 16, scratch)

    monkeypatch.setattr(fast, "GRAIN", 1000)
    monkeypatch.setattr(fast, "_try", listen)
    ids = BATCHES["all distinct"]
    with threads(count):
        assert torch.equal(FAST.unique(ids)[0], ids)
    assert len(sizes) > 1


def test_what_is_returned_outlives_the_next_batch() -> None:
    scratch = Workspace()
    first, _ = FAST.unique(torch.tensor([4, 4, 7]), None, scratch)
    FAST.unique(torch.tensor([1, 2, 3]), None, scratch)
    assert first.tolist() == [4, 7]
