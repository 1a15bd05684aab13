"""What is foretold of tiers, against counting by hand and against tables that are run."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from kitforge.embedding_cache.miss_ratio_curve import count_larger_before, estimate, stack_distances
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.sharding.planner import (
    ShardingPlannerOptions,
    TableLoad,
    TablePlacement,
    plan_sharding,
    step_bytes,
)
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import ConfigError, DataError
from tests.embedding_cache.training import batches


def lru_hits(sequence: list[int], capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for key in sequence:
        hits += key in held
        held[key] = None
        held.move_to_end(key)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_stack_distances_give_the_hits_of_lru_at_every_size(seed: int) -> None:
    sequence = np.random.default_rng(seed).zipf(1.3, 400) % 50
    distances = np.sort(stack_distances([np.array([key]) for key in sequence.astype(np.int64)]))
    for capacity in range(1, 52):
        assert np.searchsorted(distances, capacity, side="left") == lru_hits(sequence.tolist(), capacity)


@pytest.mark.parametrize("size", [0, 1, 2, 57])
def test_larger_values_before_are_counted(size: int) -> None:
    values = np.random.default_rng(size).integers(-1, 20, size)
    expected = [int((values[:place] > value).sum()) for place, value in enumerate(values)]
    assert count_larger_before(values).tolist() == expected


@pytest.mark.slow
def test_the_curve_is_that_of_a_table_that_is_run(tmp_path: Path) -> None:
    given = [ids for ids in batches(80) if len(ids)]
    largest = max(len(torch.unique(ids)) for ids in given)
    for rows in (largest + 5, 2 * largest):
        with CachedEmbedding(None, 4, device_rows=rows, host_rows=7, path=str(tmp_path)) as table:
            told = table.estimate(given)
            for ids in table.prefetch(given, 1):
                table(ids).sum().backward()
                table.step(0.1)
            stats = table.stats()
        assert told.num_accesses == stats.rows
        assert told.num_rows == stats.hits["new"]
        assert told.largest_batch == largest
        assert stats.hit_rate == pytest.approx(told.hit_rate(rows), abs=0.02)


def test_the_answers_of_an_estimate_agree_with_one_another() -> None:
    told = CachedEmbedding(None, 4, optimizer="lazy_adam", device_rows=100).estimate(batches())
    curve = told.curve()
    assert curve[0][0] == told.largest_batch
    assert curve[-1] == (told.num_rows, told.hit_rate(told.num_rows))
    assert [rate for _, rate in curve] == sorted(rate for _, rate in curve)
    rows = told.rows_for(0.5)
    assert rows is not None
    assert told.hit_rate(rows) >= 0.5 > told.hit_rate(rows - 1)
    assert told.rows_for(1.0) is None
    assert told.row_bytes == 4 * (3 * 4 + 3)
    assert set(told.tier_bytes) == {"device", "host"}
    assert f"{told.num_rows:,} distinct" in str(told)


def test_batches_that_warm_the_tier_up_are_not_counted() -> None:
    given = [ids for ids in batches(80) if len(ids)]
    whole, warm = (
        estimate(CachedEmbeddingOptions(num_embeddings=None, dim=4), 4, given, warm_up=first) for first in (0, 40)
    )
    assert warm.num_accesses == sum(len(torch.unique(ids)) for ids in given[40:])
    assert warm.num_rows == whole.num_rows
    rows = whole.num_rows
    # By hand: a need of the second half hits in a tier of all rows where its row was needed in any batch before.
    before, hits = set[int](), 0
    for number, ids in enumerate(given):
        now = set(ids.flatten().tolist())
        hits += len(now & before) * (number >= 40)
        before |= now
    assert warm.hit_rate(rows) == pytest.approx(hits / warm.num_accesses)
    assert warm.hit_rate(rows) > whole.hit_rate(rows)


def test_a_sample_of_the_ids_gives_nearly_the_curve_of_all() -> None:
    chance = np.random.default_rng(3)
    given = [torch.from_numpy(chance.zipf(1.2, 2000) % 100_000) for _ in range(60)]
    whole, sample = (
        estimate(CachedEmbeddingOptions(num_embeddings=None, dim=4), 4, given, warm_up=30, sample_rate=rate)
        for rate in (1.0, 0.25)
    )
    assert sample.num_accesses < 0.4 * whole.num_accesses
    for rows in (2000, 5000, 10_000, 20_000):
        assert sample.hit_rate(rows) == pytest.approx(whole.hit_rate(rows), abs=0.04)


def test_nothing_cannot_be_estimated_from() -> None:
    with pytest.raises(DataError, match="needs at least one batch"):
        CachedEmbedding(None, 4).estimate([])


LARGE = TableLoad(num_rows=10**7, dim=16, width=35, distinct=50_000.0)
WIDE = TableLoad(num_rows=10**6, dim=256, width=515, distinct=800.0)
SMALL = TableLoad(num_rows=1000, dim=16, width=35, distinct=300.0)
SELDOM = TableLoad(num_rows=10**6, dim=16, width=35, distinct=4.0)


def test_tables_are_placed_by_size_and_use() -> None:
    loads = {"large": LARGE, "wide": WIDE, "small": SMALL, "seldom": SELDOM, "seldom_too": SELDOM}
    placed = plan_sharding(loads, 4, ShardingPlannerOptions())
    assert list(placed) == list(loads)
    assert {name: each.sharding_type for name, each in placed.items()} == {
        "large": "row",
        "wide": "column",
        "small": "replicate",
        "seldom": "table",
        "seldom_too": "table",
    }
    # Tables that have an owner are shared out.
    assert placed["seldom"].owner != placed["seldom_too"].owner


def test_nothing_is_replicated_beyond_the_memory_for_it_or_cut_that_cannot_be() -> None:
    for options in (ShardingPlannerOptions(replicated_bytes=1000), ShardingPlannerOptions(small_bytes=1000)):
        assert plan_sharding({"small": SMALL}, 4, options)["small"].sharding_type != "replicate"
    uncut = TableLoad(num_rows=10**6, dim=256, width=260, distinct=800.0, optimizer="rowwise_adagrad")
    assert "column" not in step_bytes(uncut, 4)
    assert "column" not in step_bytes(TableLoad(num_rows=9, dim=6, width=9, distinct=1.0), 4)
    assert plan_sharding({"any": LARGE}, 1, ShardingPlannerOptions(replicated_bytes=2**40))["any"] == TablePlacement(
        sharding_type="replicate"
    )
    with pytest.raises(ConfigError, match="replicated_bytes"):
        ShardingPlannerOptions(replicated_bytes=-1)


def test_ids_of_the_sample_are_not_looked_up() -> None:
    table = CachedEmbedding(None, 4)
    table.estimate([torch.arange(9)])
    assert table.stats().lookups == 0
