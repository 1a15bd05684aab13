"""Who leaves first, against oracles that sort everything anew each time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.embedding_cache.eviction.policy import MAX_EXPONENT, LruPolicy, build_policy
from kitforge.embedding_cache.eviction.score_queue import EvictableMask, LowestScoreQueue
from kitforge.embedding_cache.keys.slot_map import SlotMap
from kitforge.embedding_cache.options import PolicyOptions
from kitforge.embedding_cache.table import CachedEmbedding
from tests.embedding_cache.training import batches, largest_batch

ROOM, HALF_LIFE = 40, 3.0
need = st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=12)


class Oracle:
    """Scores of keys in a dict."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores: dict[int, float] = {}

    def need(self, keys: list[int], number: int) -> None:
        for key in keys:
            before = self.scores.pop(key, 0.0)
            self.scores[key] = number if self.name == "lru" else before + 2.0 ** (number / HALF_LIFE)

    def victims(self, num: int, pinned: set[int], slot_of: dict[int, int]) -> list[int]:
        going = [key for key in self.scores if key not in pinned]
        going.sort(key=lambda key: (self.scores[key], slot_of[key]))
        for key in going[:num]:
            del self.scores[key]
        return going[:num]


@pytest.mark.parametrize("name", ["lru", "lfu"])
@settings(max_examples=60)
@given(needs=st.lists(need, max_size=40))
def test_victims_are_those_of_an_oracle(name: str, needs: list[list[int]]) -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, ROOM)
    policy = build_policy(PolicyOptions(name=name, half_life=HALF_LIFE), index)
    oracle, pinned = Oracle(name), set[int]()
    for number, given_keys in enumerate(needs):
        keys = torch.tensor(given_keys)
        slots = index.lookup(keys)
        index.touch(slots[slots >= 0], number)
        missing = keys[slots < 0]
        short = len(missing) - index.num_free
        # Those of the batch before are still needed, like those of this one.
        held = pinned | set(given_keys)
        if short > 0:
            slot_of = dict(zip(index.keys_at(index.used()).tolist(), index.used().tolist(), strict=True))

            def may_go(slots: torch.Tensor, held: set[int] = held) -> torch.Tensor:
                free = [key not in held for key in index.keys_at(slots).tolist()]
                return torch.tensor(free, dtype=torch.bool) & index.is_used[slots]

            victims = policy.victims(short, may_go)
            assert index.remove(victims).tolist() == oracle.victims(short, held, slot_of)
        missing = missing[: index.num_free]
        brought = index.add(missing)
        index.touch(brought, number)
        policy.on_insert(brought, number, partial(torch.zeros, len(missing), dtype=torch.int32))
        slots = index.lookup(keys)
        policy.on_access(slots[slots >= 0], number)
        oracle.need(keys[slots >= 0].tolist(), number)
        pinned = set(given_keys)


def test_a_row_that_comes_back_brings_its_updates_as_needs() -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, 4)
    policy = build_policy(PolicyOptions(name="lfu"), index)
    slots = index.add(torch.tensor([10, 11, 12]))
    policy.on_insert(slots, 0, lambda: torch.tensor([5, 0, 9]))
    policy.on_access(slots, 0)
    assert index.keys_at(policy.victims(3, lambda slots: index.is_used[slots])).tolist() == [11, 10, 12]


def test_counts_that_would_leave_their_range_are_scaled_down_together() -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, 3)
    policy = build_policy(PolicyOptions(name="lfu", half_life=1.0), index)
    for number, key in ((0, 7), (int(MAX_EXPONENT) + 5, 8), (int(MAX_EXPONENT) + 7, 9)):
        slots = index.add(torch.tensor([key]))
        policy.on_insert(slots, number, lambda: torch.zeros(1, dtype=torch.int32))
        policy.on_access(slots, number)
    assert index.keys_at(policy.victims(3, lambda slots: index.is_used[slots])).tolist() == [7, 8, 9]


def test_rows_needed_when_counts_are_scaled_down_are_scaled_with_them() -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, 4)
    policy = build_policy(PolicyOptions(name="lfu", half_life=1.0), index)
    slots = index.add(torch.arange(4))
    for number in range(2 * int(MAX_EXPONENT) + 3):
        index.touch(slots, number)
        # Of all rows in each batch but those that scale the counts down, where only the first row is needed.
        policy.on_access(slots[:1] if number % (int(MAX_EXPONENT) + 1) == 0 else slots, number)
    # Then the others go on being needed.
    for later in range(number + 1, number + 4):
        policy.on_access(slots[1:], later)
    assert policy.victims(1, lambda slots: torch.ones(len(slots), dtype=torch.bool)).tolist() == slots[:1].tolist()


def test_lookahead_gives_up_what_is_needed_last() -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, 5)
    policy = build_policy(PolicyOptions(name="lookahead", window=3), index)
    index.touch(index.add(torch.arange(5)), 0)
    for keys in ([0], [1, 4], [2, 0]):
        policy.future.append(torch.tensor(keys))
    order = policy.victims(5, lambda slots: index.is_used[slots])
    assert index.keys_at(order).tolist() == [3, 2, 1, 4, 0]
    policy.future.popleft()
    assert index.keys_at(policy.victims(2, lambda slots: index.is_used[slots])).tolist() == [3, 0]
    policy.future.clear()
    assert index.keys_at(policy.victims(1, lambda slots: index.is_used[slots])).tolist() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_the_coldest_are_found_without_sorting_all_each_time(dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    scores = torch.from_numpy(random.integers(0, 50, 4000)).to(dtype)
    coldest, used = LowestScoreQueue(), torch.ones(4000, dtype=torch.bool)
    searches = 0
    search = coldest._search

    def counted(*arguments: Any) -> bool:
        nonlocal searches
        searches += 1
        return search(*arguments)

    coldest._search = counted  # type: ignore[method-assign]
    for round_number in range(100):
        picked = coldest.pick(scores, lambda: used.nonzero().squeeze(1), 20, lambda slots: used[slots])
        order = np.lexsort((np.arange(4000), scores.numpy()))
        expected = [slot for slot in order.tolist() if used[slot]][:20]
        assert picked.tolist() == expected
        used[picked] = False
        touched = torch.from_numpy(random.permutation(4000)[:300])
        scores[touched] += round_number % 7
        back = picked[::2]
        used[back] = True
        scores[back] = round_number % 90
        coldest.reset_slots.append(back)
    assert searches < 30


def searches_for_the_oldest(gap: int) -> int:
    """Whether those used longest ago are picked, in their order, round by round; by how many looks at all slots."""
    index = SlotMap(TABLE_REFERENCE.hash_map, 4000)
    oldest, random, searches = LruPolicy(index), np.random.default_rng(0), 0
    index.touch(index.add(torch.arange(3900)), 0)
    search = oldest._search

    def counted(size: int) -> bool:
        nonlocal searches
        searches += 1
        return search(size)

    oldest._search = counted  # type: ignore[method-assign]
    for number in range(gap, 100 * gap, gap):
        # Every seventh is needed at first.
        is_free = (torch.arange(4000) % 7 != 0) | (number > 50 * gap)
        picked = oldest.victims(20, lambda slots, is_free=is_free: index.is_used[slots] & is_free[slots])
        order = np.lexsort((np.arange(4000), index.last_use.numpy()))
        assert picked.tolist() == [slot for slot in order.tolist() if index.is_used[slot] and is_free[slot]][:20]
        index.remove(picked)
        index.touch(index.add(4000 * number + torch.arange(15)), number)
        index.touch(index.used()[torch.from_numpy(random.permutation(len(index))[:300])], number)
    return searches


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1, 2**13])
def test_the_oldest_are_found_by_few_looks_at_all_slots(gap: int) -> None:
    assert searches_for_the_oldest(gap) < 30


def those_used_again_are_picked(patch: pytest.MonkeyPatch) -> None:
    first = LruPolicy._first

    def believing(oldest: LruPolicy, num: int, may_go: EvictableMask) -> Any:
        oldest._uses = oldest._index.last_use.numpy()[oldest._queue]
        return first(oldest, num, may_go)

    patch.setattr(LruPolicy, "_first", believing)


def those_that_must_stay_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    first = LruPolicy._first

    def expiry(oldest: LruPolicy, num: int, may_go: EvictableMask) -> Any:
        picked = first(oldest, num, may_go)
        goes = may_go(torch.from_numpy(oldest._queue)).numpy()
        oldest._queue, oldest._uses = oldest._queue[goes], oldest._uses[goes]
        return picked

    patch.setattr(LruPolicy, "_first", expiry)


def they_come_in_the_order_of_slots(patch: pytest.MonkeyPatch) -> None:
    search = LruPolicy._search

    def unsorted(oldest: LruPolicy, size: int) -> bool:
        is_whole = search(oldest, size)
        order = oldest._queue.argsort()
        oldest._queue, oldest._uses = oldest._queue[order], oldest._uses[order]
        return is_whole

    patch.setattr(LruPolicy, "_search", unsorted)


def numbers_are_sorted_by_their_last_bits(patch: pytest.MonkeyPatch) -> None:
    search = LruPolicy._search

    def narrow(oldest: LruPolicy, size: int) -> bool:
        is_whole = search(oldest, size)
        order = oldest._uses.astype(np.uint16).argsort(kind="stable")
        oldest._queue, oldest._uses = oldest._queue[order], oldest._uses[order]
        return is_whole

    patch.setattr(LruPolicy, "_search", narrow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        those_used_again_are_picked,
        those_that_must_stay_are_forgotten,
        they_come_in_the_order_of_slots,
        numbers_are_sorted_by_their_last_bits,
    ],
)
def test_a_planted_fault_in_finding_the_oldest_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        searches_for_the_oldest(2**13)


def test_all_that_may_go_are_picked_where_there_are_too_few() -> None:
    index = SlotMap(TABLE_REFERENCE.hash_map, ROOM)
    oldest = LruPolicy(index)
    assert len(oldest.victims(3, lambda slots: index.is_used[slots])) == 0
    index.touch(index.add(torch.arange(9)), 4)
    assert oldest.victims(ROOM, lambda slots: slots < 5).tolist() == [0, 1, 2, 3, 4]


def test_knowing_the_future_moves_fewer_rows_than_guessing() -> None:
    moved = {}
    for name in ("lru", "lookahead"):
        options = PolicyOptions(name=name, window=12)
        table = CachedEmbedding(None, 4, device_rows=largest_batch() + 8, policy=options)
        for ids in table.prefetch(batches(60), 1):
            table(ids).sum().backward()
            table.step(0.1)
        moved[name] = table.stats().evicted
    assert moved["lookahead"] < 0.9 * moved["lru"]
