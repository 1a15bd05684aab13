"""The order of rows: a permutation an epoch, other epochs other orders, and no matter how it is asked for."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data.sampler import _feistel, shuffled_indices
from kitforge.foundation.seed import key


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 10, 64, 99, 100, 101, 4095, 4096, 4097, 10_000])
@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_visits_every_row_once(num_rows: int, epoch: int) -> None:
    rows = shuffled_indices(0, num_rows, epoch * num_rows, num_rows)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


def test_a_large_epoch_visits_no_row_twice() -> None:
    num_rows = 1_000_003
    rows = np.concatenate([shuffled_indices(5, num_rows, start, 4096) for start in range(0, num_rows - 4096, 40_960)])
    assert len(np.unique(rows)) == len(rows)
    assert 0 <= rows.min() <= rows.max() < num_rows


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 12, 97, 1000])
def test_the_network_is_a_bijection_of_a_range_hardly_larger_than_the_rows(num_rows: int) -> None:
    width = int(np.ceil(np.sqrt(num_rows)))
    size = width * -(-num_rows // width)
    found = _feistel(np.arange(size, dtype=np.uint64), num_rows, [key("round", number) for number in range(8)])
    assert sorted(found.tolist()) == list(range(size))


@given(st.integers(1, 60), st.integers(0, 200), st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_how_the_samples_are_asked_for_does_not_matter(
    num_rows: int, start: int, counts: list[int], shuffle: bool
) -> None:
    whole = shuffled_indices(1, num_rows, start, sum(counts), shuffle=shuffle).tolist()
    chunks: list[int] = []
    for count in counts:
        chunks += shuffled_indices(1, num_rows, start + len(chunks), count, shuffle=shuffle).tolist()
    assert chunks == whole


def test_epochs_and_seeds_differ() -> None:
    orders = [shuffled_indices(seed, 1000, epoch * 1000, 1000).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in orders}) == 4


def test_without_shuffling_rows_come_in_turn() -> None:
    assert shuffled_indices(0, 3, 2, 5, shuffle=False).tolist() == [2, 0, 1, 2, 0]


def test_the_order_is_the_same_in_every_version() -> None:
    assert shuffled_indices(42, 1_000_003, 7, 4).tolist() == [804110, 46781, 265354, 934419]


def test_all_orders_of_a_few_rows_are_about_equally_frequent() -> None:
    counts = Counter(tuple(shuffled_indices(seed, 4, 0, 4).tolist()) for seed in range(2400))
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom is below 50 in 999 of 1000 fair draws.
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50


def test_neighbours_do_not_stay_neighbours() -> None:
    rows = shuffled_indices(0, 10_000, 0, 10_000)
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.04
    assert np.count_nonzero(np.diff(rows) == 1) < 10


def test_what_was_given_may_be_written_to() -> None:
    rows = shuffled_indices(0, 10, 0, 10)
    wanted = rows.tolist()
    rows[:] = 0
    assert shuffled_indices(0, 10, 0, 10).tolist() == wanted
