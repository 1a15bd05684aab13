"""N ranks equal one process: initial weights bit for bit, loss, norm and every gradient within 1e-9 in float64."""

import itertools
import os
import random
from functools import cache

import pytest
import torch

from kitforge.core.parallel.config import ParallelConfig
from tests.distributed.ranks import run_ranks
from tests.distributed.step import FAMILIES, Case, Outcome, difference, run_step

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
# `make prove` takes all of them, every other run a seeded sample.
CASES = PRODUCT if "KITFORGE_PROVE" in os.environ else random.Random(1).sample(PRODUCT, 14)


def words(case: Case) -> str:
    split = case.degrees.describe().split(" = ")[0].replace(" x ", ",")
    stage = f",zero={case.degrees.zero_stage}" if case.degrees.shard > 1 else ""
    return f"{case.family}-{split}{stage}{'' if case.degrees.sequence_parallel else ',whole'}-{case.micro_batches}"


@cache
def alone(family: str) -> Outcome:
    torch.set_num_threads(1)
    return run_step(0, Case(family=family, degrees=ParallelConfig()))


def check_equal(case: Case) -> None:
    one = alone(case.family)
    for outcome in run_ranks(case.degrees.world_size, run_step, case):
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, outcome.regions[name].of(one.weights[name])), name
        assert difference(outcome, one) < 1e-9


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=words)
def test_ranks_equal_one_process(case: Case) -> None:
    check_equal(case)


@pytest.mark.parametrize("degrees", [ParallelConfig(shard=2), ParallelConfig(tensor=2)], ids=["shard", "tensor"])
def test_recomputation_changes_nothing(degrees: ParallelConfig) -> None:
    check_equal(Case(family="gpt2", degrees=degrees, micro_batches=2, recompute=True))


def test_the_reference_kernels_are_cut_as_well() -> None:
    check_equal(Case(family="llama", degrees=ParallelConfig(tensor=2), level="O0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "degrees"),
    [
        ("a partial gradient that is not summed", ParallelConfig(tensor=2)),
        ("a tied weight without the head's gradient", ParallelConfig(tensor=2)),
        ("a norm that counts copies", ParallelConfig(shard=2, tensor=2)),
        ("the same dropout on every piece", ParallelConfig(tensor=2)),
        ("the same dropout on every piece", ParallelConfig(tensor=2, sequence_parallel=False)),
        ("a loss averaged on each rank", ParallelConfig(data=2)),
        ("copies that do not sum", ParallelConfig(data=2)),
        ("a bias added on every rank", ParallelConfig(tensor=2)),
    ],
)
def test_a_planted_fault_is_seen(fault: str, degrees: ParallelConfig) -> None:
    outcomes = run_ranks(degrees.world_size, run_step, Case(family="gpt2", degrees=degrees), fault)
    assert max(difference(outcome, alone("gpt2")) for outcome in outcomes) > 1e-4
