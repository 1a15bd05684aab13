"""N ranks equal one process: initial weights bit for bit, loss, norm and every gradient within 1e-9 in float64.

One launch for each number of ranks runs all steps of that number.
"""

import dataclasses
import itertools
import random
from functools import cache
from typing import get_args

import pytest
import torch

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.parallel.config import ParallelConfig
from tests.distributed.ranks import run_ranks
from tests.distributed.step import FAMILIES, Case, Order, Outcome, covering, difference, first_difference, run_step

MESHES = [
    ParallelConfig(data=2),
    ParallelConfig(data=3),
    ParallelConfig(data=4),
    ParallelConfig(shard=2),
    ParallelConfig(shard=3),
    ParallelConfig(shard=4),
    ParallelConfig(shard=2, zero_stage=1),
    ParallelConfig(shard=2, zero_stage=2),
    ParallelConfig(tensor=2),
    ParallelConfig(tensor=4),
    ParallelConfig(tensor=2, sequence_parallel=False),
    ParallelConfig(tensor=4, sequence_parallel=False),
    ParallelConfig(data=2, shard=2),
    ParallelConfig(data=2, shard=2, zero_stage=1),
    ParallelConfig(data=2, shard=2, zero_stage=2),
    ParallelConfig(data=2, tensor=2),
    ParallelConfig(shard=2, tensor=2),
    ParallelConfig(shard=2, tensor=2, zero_stage=1),
    ParallelConfig(shard=2, tensor=2, zero_stage=2),
    ParallelConfig(shard=2, tensor=2, sequence_parallel=False),
]
PRODUCT = [
    Case(family=family, degrees=degrees, micro_batches=micro_batches)
    for family, degrees, micro_batches in itertools.product(FAMILIES, MESHES, (1, 3))
    # Sources and targets of any length have no sequence to cut.
    if family != "t5" or degrees.tensor == 1 or not degrees.sequence_parallel
]
RECOMPUTED = [
    Case(family=family, degrees=degrees, micro_batches=2)
    for family, degrees in (
        ("gpt2", ParallelConfig(shard=2)),
        ("gpt2", ParallelConfig(tensor=2)),
        ("llama", ParallelConfig(tensor=2)),
        ("t5", ParallelConfig(tensor=2, sequence_parallel=False)),
        *(("pangu_alpha", ParallelConfig(shard=2, zero_stage=stage)) for stage in (1, 2)),
        ("glm", ParallelConfig(shard=2, tensor=2)),
        ("bloom", ParallelConfig(data=2)),
    )
]
SURE = [
    Case(family="llama", degrees=ParallelConfig(tensor=2), level="O0"),
    Case(family="mixtral", degrees=ParallelConfig(tensor=2), micro_batches=3),
    Case(family="mixtral", degrees=ParallelConfig(shard=2), micro_batches=3),
    Case(family="mixtral", degrees=ParallelConfig(data=2)),
    Case(family="qwen3_moe", degrees=ParallelConfig(shard=2, tensor=2), micro_batches=3),
    Case(family="qwen3_moe", degrees=ParallelConfig(data=2, shard=2, zero_stage=2)),
    Case(family="mixtral_shared", degrees=ParallelConfig(shard=2, tensor=2), micro_batches=2),
    Case(family="mixtral_shared", degrees=ParallelConfig(tensor=2, sequence_parallel=False), recompute="full"),
]
CASES = [
    case
    for case in covering([*RECOMPUTED, *SURE, *random.Random(1).sample(PRODUCT, len(PRODUCT))])
    if case not in RECOMPUTED
]


def words(case: Case) -> str:
    split = case.degrees.describe().split(" = ")[0].replace(" x ", ",")
    split += f",expert={case.degrees.expert}" if case.degrees.expert > 1 else ""
    stage = f",zero={case.degrees.zero_stage}" if case.degrees.shard > 1 else ""
    return f"{case.family}-{split}{stage}{'' if case.degrees.sequence_parallel else ',whole'}-{case.micro_batches}"


@cache
def alone(family: str) -> Outcome:
    torch.set_num_threads(1)
    return run_step(0, Case(family=family, degrees=ParallelConfig()))


def steps(rank: int, cases: list[Case]) -> list[Outcome]:
    return [run_step(rank, case) for case in cases]


@cache
def launched(size: int) -> list[list[Outcome]]:
    """Of each rank of one launch the outcomes of all cases of so many, as in `cases_of`."""
    torch.set_num_threads(1)
    return run_ranks(size, steps, cases_of(size))


def cases_of(size: int) -> list[Case]:
    return [case for case in CASES if case.degrees.world_size == size]


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=words)
def test_ranks_equal_one_process(case: Case) -> None:
    one, size = alone(case.family), case.degrees.world_size
    number = cases_of(size).index(case)
    outcomes = [rank[number] for rank in launched(size)]
    assert first_difference([each.order for each in outcomes]) is None
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, outcome.regions[name].of(one.weights[name])), name
        assert difference(outcome, one) < 1e-9


def recomputed(rank: int, cases: list[Case]) -> list[dict[Recompute, Outcome]]:
    kinds = get_args(Recompute)
    return [{each: run_step(rank, dataclasses.replace(case, recompute=each)) for each in kinds} for case in cases]


@cache
def launched_again(size: int) -> dict[Case, list[dict[Recompute, Outcome]]]:
    """Of each case of so many ranks what each rank has."""
    cases = [case for case in RECOMPUTED if case.degrees.world_size == size]
    return dict(zip(cases, map(list, zip(*run_ranks(size, recomputed, cases), strict=True)), strict=True))


@pytest.mark.parametrize("case", RECOMPUTED, ids=words)
def test_recomputation_changes_no_bit_and_repeats_no_reduction(case: Case) -> None:
    degrees, one = case.degrees, alone(case.family)
    ranks = launched_again(degrees.world_size)[case]
    for found in ranks:
        wanted = found["none"]
        assert difference(wanted, one) < 1e-9
        for recompute, outcome in found.items():
            assert outcome.norm == wanted.norm
            for name, gradient in outcome.gradients.items():
                assert torch.equal(gradient, wanted.gradients[name]), (recompute, name)
        if degrees.tensor > 1 and degrees.shard == 1:
            sums, gathers = ("c10d::allreduce_", "c10d::_reduce_scatter_base_"), "c10d::_allgather_base_"
            assert found["selective"].count(*sums) == wanted.count(*sums) < found["full"].count(*sums)
            # Two of each block, which takes two micro-batches.
            again = found["selective"].count(gathers) - wanted.count(gathers)
            assert again == (2 * 2 * 2 if degrees.sequence_parallel else 0)
    for recompute in get_args(Recompute):
        assert first_difference([found[recompute].order for found in ranks]) is None, recompute


def test_another_order_of_collectives_would_show() -> None:
    sums, gather = ("c10d::allreduce_", ((2,),)), ("c10d::_allgather_base_", ((4,), (2,)))
    one: Order = {(0, 1): [sums, gather], (0,): [gather]}
    assert first_difference([one, {(0, 1): [sums, gather]}]) is None
    for other in ([gather, sums], [sums], [sums, gather, sums], [sums, ("c10d::_allgather_base_", ((6,), (3,)))]):
        assert first_difference([one, {(0, 1): other}]) is not None
    assert first_difference([one, {}]) is not None
