"""The order of rows and the batches of it: a permutation an epoch, the same for any layout and after any resume."""

from collections import Counter
from itertools import groupby, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data.schedule import (
    BatchSchedule,
    _feistel,
    shared_prompt_batches,
    shuffled_indices,
    token_budget_batches,
)
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


def schedules(replicas: int, **options: Any) -> list[BatchSchedule]:
    return [BatchSchedule(**options, replica=each, num_replicas=replicas) for each in range(replicas)]


# The batches of all kits


def test_the_order_of_a_seed_is_fixed() -> None:
    """Runs of earlier versions resume into this order."""
    first, second, *_ = BatchSchedule(num_rows=7, batch_size=5, seed=3, epochs=2.0).batches(0)
    assert (first.start, first.rows.tolist()) == (0, FIRST)
    assert (second.start, second.rows.tolist()) == (5, SECOND)


FIRST, SECOND = ([3, 6, 4, 0, 5], [2, 1, 2, 3, 4])
FUZZ = {
    "num_rows": st.integers(1, 40),
    "batch_size": st.integers(1, 9),
    "micro_batch_size": st.none() | st.integers(1, 4),
    "epochs": st.none() | st.sampled_from([0.3, 1.0, 2.5]),
    "max_steps": st.none() | st.just(9),
    "shuffle": st.booleans(),
}


@given(st.fixed_dictionaries(FUZZ), st.integers(1, 5))
def test_micro_batches_of_all_replicas_are_the_batch(options: dict[str, Any], replicas: int) -> None:
    whole = BatchSchedule(seed=1, **options)
    for batch in islice(whole.batches(0), 12):
        parts = [each.micro_batches(len(batch.rows)) for each in schedules(replicas, seed=1, **options)]
        assert len({len(each) for each in parts}) == 1
        assert [index for part in parts for each in part for index in range(each.start, each.stop)] == list(
            range(len(batch.rows))
        )
        assert max(each.stop - each.start for part in parts for each in part) <= (options["micro_batch_size"] or 99)


@given(st.fixed_dictionaries(FUZZ), st.integers(1, 3), st.integers(1, 20))
def test_slices_of_a_micro_batch_follow_one_another_and_differ_by_a_row_at_most(
    options: dict[str, Any], replicas: int, size: int
) -> None:
    lengths = [1 + row * 7 % 5 for row in range(size)]
    whole, cut = (schedules(replicas, seed=1, **options, copies=copies) for copies in (1, 2))
    for one, other in zip(whole, cut, strict=True):
        for found, slices in (
            (
                [range(size)[each] for each in one.micro_batches(size)],
                [range(size)[each] for each in other.micro_batches(size)],
            ),
            (one.length_buckets(lengths, 9), other.length_buckets(lengths, 9)),
        ):
            assert len(slices) == 2 * len(found)
            for each, first, second in zip(found, slices[::2], slices[1::2], strict=True):
                assert [*first, *second] == [*each]
                assert len(second) <= len(first) <= len(second) + 1


@given(st.fixed_dictionaries(FUZZ), st.integers(1, 5), st.integers(0, 11))
def test_a_resumed_run_takes_the_batches_that_are_left(options: dict[str, Any], replicas: int, done: int) -> None:
    whole = list(islice(BatchSchedule(seed=1, **options).batches(0), 12))
    if done >= len(whole):
        return
    rest = islice(BatchSchedule(seed=1, **options, num_replicas=replicas).batches(whole[done].start), 12 - done)
    assert [(each.start, each.rows.tolist()) for each in rest] == [
        (each.start, each.rows.tolist()) for each in whole[done:]
    ]


@given(st.fixed_dictionaries(FUZZ))
def test_epochs_end_where_num_steps_says(options: dict[str, Any]) -> None:
    schedule = BatchSchedule(seed=1, **options)
    if options["epochs"] is None and options["max_steps"] is not None:
        assert len(list(islice(schedule.batches(0), 200))) == 200
    else:
        batches = list(schedule.batches(0))
        assert len(batches) == schedule.num_steps(options["epochs"] or 1.0)
        assert sum(len(each.rows) for each in batches) == schedule.num_samples(options["epochs"] or 1.0)


@given(st.fixed_dictionaries(FUZZ), st.integers(1, 5), st.none() | st.integers(1, 3), st.integers(0, 50))
def test_evaluation_takes_the_same_rows_in_every_layout(
    options: dict[str, Any], replicas: int, limit: int | None, num_rows: int
) -> None:
    wanted = range(num_rows if limit is None else min(num_rows, limit * options["batch_size"]))
    options = {**options, "seed": 1, "max_eval_batches": limit}
    parts = [list(each.eval_shards(num_rows)) for each in schedules(replicas, **options)]
    assert len({len(each) for each in parts}) == 1
    assert sorted(index for part in parts for each in part for index in each.tolist()) == list(wanted)
    batches = BatchSchedule(**options).eval_batches(num_rows)
    assert [index for each in batches for index in each.tolist()] == list(wanted)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 4))
def test_length_buckets_hold_their_tokens(lengths: list[int], max_tokens: int, replicas: int) -> None:
    options = {"num_rows": 1, "batch_size": 1, "seed": 0}
    parts = [each.length_buckets(lengths, max_tokens) for each in schedules(replicas, **options)]
    assert len({len(each) for each in parts}) == 1
    assert sorted(index for part in parts for each in part for index in each.tolist()) == list(range(len(lengths)))
    for each in (each for part in parts for each in part if len(each) > 1):
        assert max(lengths[index] for index in each) * len(each) <= max_tokens


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=30), st.integers(1, 20))
def test_batches_count_a_shared_prompt_once(answers: list[tuple[int, int]], max_tokens: int) -> None:
    prompts = [np.arange(1 + number, dtype=np.int64).tobytes() for number, _ in answers]
    lengths = [1 + number + further for number, further in answers]
    batches = shared_prompt_batches(range(len(answers)), lengths, max_tokens, prompts)
    order = [index for each in batches for index in each.tolist()]
    assert sorted(order) == list(range(len(answers)))
    runs = [key for key, _ in groupby(prompts[index] for index in order)]
    assert len(runs) == len(set(runs))
    sizes = []
    for batch in (each.tolist() for each in batches):
        distinct = {answers[index][0] for index in batch}
        sizes.append(sum(1 + number for number in distinct) + sum(answers[index][1] for index in batch))
        padded = max(lengths[index] for index in batch) * len(batch)
        assert len(batch) == 1 or (sizes[-1] <= max_tokens and padded <= 4 * max_tokens)
    # None could have been closed later.
    for batch, following, size in zip(batches, batches[1:], sizes, strict=False):
        number, further = answers[following[0]]
        known = number in {answers[index][0] for index in batch}
        grown = max(lengths[index] for index in (*batch, following[0])) * (len(batch) + 1)
        assert size + further + (0 if known else 1 + number) > max_tokens or grown > 4 * max_tokens


def test_rows_of_a_prompt_are_of_one_replica() -> None:
    prompts = [bytes([number]) * 8 for number in (3, 1, 3, 2, 1, 3, 2, 3)]
    parts = [each.length_buckets([4] * 8, 100, prompts) for each in schedules(2, num_rows=1, batch_size=1, seed=0)]
    assert [[set(each.tolist()) for each in part] for part in parts] == [[{0, 2, 5, 7}], [{1, 4, 3, 6}]]


def test_without_a_budget_length_buckets_are_micro_batches() -> None:
    options = {"num_rows": 1, "batch_size": 1, "seed": 0}
    for chosen, expected in (({"micro_batch_size": 2}, [[0, 1], [2]]), ({"max_tokens": 9}, [[2], [0], [1]])):
        batches = BatchSchedule(**options, **chosen).length_buckets([5, 1, 9])
        assert [each.tolist() for each in batches] == expected
    assert [each.tolist() for each in token_budget_batches([0, 1, 2], [5, 1, 9], 10)] == [[2], [0, 1]]
