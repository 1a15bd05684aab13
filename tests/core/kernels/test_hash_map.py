"""Maps from any int64 to slots, against a dict."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.core.kernels.hash_map import numba as fast
from kitforge.core.kernels.hash_map.reference import FoundIds
from tests.core.kernels.records import EXTREME, FAST, KERNELS, seeded, threads

# Few keys, so that they are met again, and keys that collide: the finaliser is undone for numbers that differ only in
# bits above those that a small table looks at.
KEYS = st.sampled_from(EXTREME) | st.integers(-9, 9) | st.integers(-(2**63), 2**63 - 1)
BATCHES = st.lists(KEYS, max_size=40, unique=True)
CALLS = st.lists(st.tuples(st.sampled_from(["insert", "replace", "remove", "lookup"]), BATCHES), max_size=12)


def keys_of_home(home: int, count: int) -> list[int]:
    """Keys that a table of the smallest size looks for first in the same place."""
    mask = fast.SMALLEST_TABLE - 1
    return [key for key in range(-20000, 20000) if fast._home(key, mask) == home][:count]


def vector(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def compare_distinct(found: FoundIds, asked: list[int], oracle: dict[int, int]) -> None:
    """Whether those are the distinct ids, with the slots of the oracle, under a bound of 5."""
    keys = list(dict.fromkeys(asked))
    assert found.keys.tolist() == keys
    assert found.inverse.tolist() == [keys.index(key) for key in asked]
    assert found.slots.tolist() == [oracle.get(key, -1) for key in keys]
    assert found.num_missing == sum(key not in oracle for key in keys)
    assert found.num_outside == sum(not 0 <= key < 5 for key in asked)


def check(kernels: str, calls: list[tuple[str, list[int]]]) -> None:
    """Whether a map answers as a dict does, after each of these calls."""
    found, oracle, next_slot = KERNELS[kernels].hash_map(), dict[int, int](), 0
    for call, keys in calls:
        if call == "insert":
            slots = list(range(next_slot, next_slot + len(keys)))
            next_slot += len(keys)
            found.insert(vector(keys), vector(slots))
            oracle.update(zip(keys, slots, strict=True))
        elif call == "replace":
            keys = [key for key in keys if key in oracle]
            slots = list(range(next_slot, next_slot + len(keys)))
            next_slot += len(keys)
            found.replace(vector(keys), vector(slots))
            oracle.update(zip(keys, slots, strict=True))
        elif call == "remove":
            assert found.remove(vector(keys)).tolist() == [oracle.pop(key, -1) for key in keys]
        asked = [*keys, *EXTREME, *oracle, *keys]
        assert found.lookup(vector(asked)).tolist() == [oracle.get(key, -1) for key in asked]
        marks = torch.zeros(next_slot, dtype=torch.int64)
        assert found.lookup(vector(keys), marks, 3).tolist() == [oracle.get(key, -1) for key in keys]
        assert marks.nonzero().flatten().tolist() == sorted(oracle[key] for key in keys if key in oracle)
        compare_distinct(found.find_distinct(vector(asked), 5), asked, oracle)
        assert found.find_distinct(vector(asked)).num_outside == 0
        assert len(found) == len(oracle)
    assert [part.tolist() for part in found.items()] == [sorted(oracle), [oracle[key] for key in sorted(oracle)]]


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_answers_as_a_dict_does(kernels: str, calls: list[tuple[str, list[int]]]) -> None:
    check(kernels, calls)


# A run of keys that wraps round the end of the table, from which keys leave in any order.
CROWD = keys_of_home(fast.SMALLEST_TABLE - 3, 12) + keys_of_home(fast.SMALLEST_TABLE - 1, 6) + keys_of_home(1, 6)


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(len(CROWD))), leaving=st.integers(1, len(CROWD)))
def test_keys_that_crowd_one_place_leave_in_any_order(order: list[int], leaving: int) -> None:
    keys = [CROWD[place] for place in order]
    check("fast", [("insert", sorted(CROWD)), *[("remove", [key]) for key in keys[:leaving]], ("insert", keys)])


def without_moving_up(table: Any, gap: int) -> None:
    """The fault of a map that frees a place and thinks no more of it."""
    table[gap, 1] = fast.FREE


def up_to_its_home_only(table: Any, gap: int) -> None:
    """The fault of moving up what then lies in front of its home."""
    mask = len(table) - 1
    place = (gap + 1) & mask
    while table[place, 1] != fast.FREE:
        table[gap] = table[place]
        gap, place = place, (place + 1) & mask
    table[gap, 1] = fast.FREE


@pytest.mark.parametrize("fault", [without_moving_up, up_to_its_home_only])
def test_a_planted_fault_of_removal_is_seen(fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    # The loops as Python runs them, so that one of them can be exchanged.
    for name in ("_probe", "_lookup", "_lookup_and_mark", "_insert", "_remove"):
        monkeypatch.setattr(fast, name, getattr(fast, name).py_func)
    monkeypatch.setattr(fast, "prefetch", lambda *_: None)
    monkeypatch.setattr(fast, "_home", lambda key, mask: np.uint64(key) & np.uint64(mask))
    monkeypatch.setattr(fast, "_close", fault)
    size = fast.SMALLEST_TABLE
    with pytest.raises(AssertionError):
        check("fast", [("insert", [0, size, 1, 2]), ("remove", [0]), ("remove", [1])])


def test_grows_far_beyond_its_first_room_and_shrinks_to_nothing() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (20000,), generator=seeded(0)).unique()
    found = FAST.hash_map()
    for portion in torch.arange(len(keys)).split(777):
        found.insert(keys[portion], portion)
    assert torch.equal(found.lookup(keys), torch.arange(len(keys)))
    assert torch.equal(found.remove(keys.flip(0)), torch.arange(len(keys)).flip(0))
    assert len(found) == 0
    assert set(found.lookup(keys).tolist()) == {-1}


def test_a_map_that_keys_come_and_go_from_does_not_grow() -> None:
    found = FAST.hash_map(100)
    for first in range(0, 100_000, 100):
        found.insert(torch.arange(first, first + 100), torch.arange(100))
        assert (found.remove(torch.arange(first, first + 100)) >= 0).all()
    assert len(found._table) == len(fast._empty(100))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_find_the_same(count: int) -> None:
    keys = torch.randperm(3 * fast.GRAIN, generator=seeded(1)) * 12345678910111213
    found = FAST.hash_map(len(keys))
    found.insert(keys[::2], torch.arange(len(keys))[::2])
    is_known, order = torch.arange(len(keys)) % 2 == 0, torch.arange(len(keys))
    marks = torch.zeros_like(keys)
    with threads(count):
        assert torch.equal(found.lookup(keys), torch.where(is_known, order, -1))
        assert torch.equal(found.lookup(keys, marks, 9), torch.where(is_known, order, -1))
        assert torch.equal(marks, torch.where(is_known, 9, 0))
        found.replace(keys[::2], -2 - order[::2])
        assert torch.equal(found.lookup(keys, marks, 7), torch.where(is_known, -2 - order, -1))
    assert torch.equal(marks, torch.where(is_known, 9, 0))


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_keys_are_no_trouble(kernels: str) -> None:
    check(kernels, [("insert", []), ("remove", []), ("lookup", []), ("insert", [5]), ("insert", []), ("remove", [])])
