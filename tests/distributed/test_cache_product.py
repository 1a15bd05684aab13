"""What `test_cache.py` looks at in two cases, for every look-ahead, policy and capacity: cached equals uncached on each
rank, bit for bit."""

import functools
import itertools
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kitforge.embedding_cache.sharding.planner import ShardingType
from tests.distributed.ranks import run_ranks
from tests.distributed.test_cache import JOBS, Result, alone, new_table, result_of, train
from tests.embedding_cache.training import DEPTHS, POLICIES, TIERS, Case, bits, sampled, sleeping

# Shares above the largest batch of all ranks, of which each has a part.
SPARES = (-0.6, -0.3, 0.0)
AXES = itertools.product(POLICIES, DEPTHS, SPARES)
CASES = [
    Case(policy=policy, depth=depth, tiers=TIERS[number % len(TIERS)], spare=spare)
    for number, (policy, depth, spare) in enumerate(AXES)
]
PRODUCT = [(num_ranks, *job) for num_ranks in (2, 4) for job in JOBS]
IS_WHOLE = bool(os.environ.get("KITFORGE_PROVE"))


def on_ranks(rank: int, way: ShardingType, optimizer: str, cases: list[Case], folder: str) -> list[Result]:
    groups, results = (dist.group.WORLD, dist.new_group()), []
    for number, each in enumerate([Case(tiers="whole", depth=0), *cases]):
        case = Case(optimizer=optimizer, policy=each.policy, depth=each.depth, tiers=each.tiers, spare=each.spare)
        # Every other case with random delays in all threads, and with evaluations in between. Rows that move while they
        # rest are told of it when they are looked at, which shows in their records.
        looks = number % 2 == 1 and optimizer != "adam"
        with sleeping(number % 2 * number), new_table(way, case, Path(folder), groups) as table:
            results.append(result_of(table, train(table, case.depth, looks=looks)))
    return results


@functools.lru_cache(maxsize=1)
def trained(num_ranks: int, way: ShardingType, optimizer: str) -> list[list[Result]]:
    """For each rank the results without a cache, then those of all cases."""
    alone(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(num_ranks, on_ranks, way, optimizer, CASES if IS_WHOLE else sampled(CASES, 3, seed=0), folder)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("place", range(len(CASES) if IS_WHOLE else 3))
@pytest.mark.parametrize(("num_ranks", "way", "optimizer"), PRODUCT if IS_WHOLE else PRODUCT[:1])
def test_cached_equals_uncached_on_every_rank(num_ranks: int, way: ShardingType, optimizer: str, place: int) -> None:
    for whole, *cached in trained(num_ranks, way, optimizer):
        for key in whole:
            assert torch.equal(bits(whole[key]), bits(cached[place][key])), key
