"""Places of keys in a list, for any int64 and any crowding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kitforge.data.tables import id_index
from kitforge.data.tables.frequency_counter import FrequencyCounter
from kitforge.data.tables.id_index import IdIndex

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, unique=True, max_size=40), st.lists(INT64, max_size=10))
def test_every_key_is_found_where_it_stands_and_no_other_is(keys: list[int], others: list[int]) -> None:
    index = IdIndex(np.array(keys, np.int64))
    asked = [*keys, *others, 0, -1, -(2**63)]
    wanted = [keys.index(key) if key in keys else -1 for key in asked]
    assert index.find(np.array(asked, np.int64)).tolist() == wanted


def test_keys_that_all_want_one_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_index, "hash_array", lambda numbers, _: numbers * np.uint64(0))
    keys = np.arange(100, dtype=np.int64)
    index = IdIndex(keys)
    assert index.find(keys).tolist() == keys.tolist()
    assert index.find(np.array([100, -1])).tolist() == [-1, -1]


def test_a_large_list_is_found_whole() -> None:
    keys = np.random.default_rng(0).permutation(np.arange(-100_000, 100_000))
    assert np.array_equal(IdIndex(keys).find(keys), np.arange(len(keys)))


def tallied(keys: NDArray[np.int64], limit: int | None, size: int) -> FrequencyCounter:
    tally = FrequencyCounter(limit)
    for start in range(0, len(keys), size):
        tally.add(keys[start : start + size])
    return tally


@given(st.lists(st.integers(-5, 5), max_size=60), st.integers(1, 20))
def test_a_tally_counts_as_one_pass_over_everything_does(keys: list[int], size: int) -> None:
    tally = tallied(np.array(keys, np.int64), None, size)
    found, counts = np.unique(np.array(keys, np.int64), return_counts=True)
    assert (tally.keys.tolist(), tally.counts.tolist()) == (found.tolist(), counts.tolist())


def test_the_most_frequent_come_first_and_equals_by_their_key() -> None:
    tally = tallied(np.array([5, 3, 3, 9, 9, 1, 7, 7, 7]), None, 2)
    assert tally.by_frequency().tolist() == [7, 3, 9, 1, 5]
    assert tally.by_frequency(min_count=2).tolist() == [7, 3, 9]
    assert tally.by_frequency(max_size=1).tolist() == [7]


@pytest.mark.parametrize("size", [997, 40_000])
def test_a_tally_that_overflows_keeps_a_sample_that_depends_on_the_keys_alone(size: int) -> None:
    keys = np.random.default_rng(0).integers(0, 20_000, 100_000)
    tally = tallied(keys, 1000, size)
    assert 300 < len(tally.keys) <= 1000
    assert tally.scale * len(tally.keys) == pytest.approx(len(np.unique(keys)), rel=0.15)
    assert tally.keys.tolist() == tallied(keys[::-1], 1000, 5000).keys.tolist()
    assert tally.counts.tolist() == [int((keys == key).sum()) for key in tally.keys]


def test_every_key_keeps_its_place_however_often_others_want_it() -> None:
    for seed in range(100):
        keys = np.random.default_rng(seed).permutation(100_000)[:64].astype(np.int64)
        assert IdIndex(keys).find(keys).tolist() == list(range(64))
