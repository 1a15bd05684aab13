"""The expert axis: experts divided among ranks equal those of one process.

One launch for each number of ranks runs all steps of that number.
"""

import dataclasses
from functools import cache

import pytest
import torch

from kitforge.core.parallel.config import ParallelConfig
from tests.distributed.ranks import run_ranks
from tests.distributed.step import Case, Outcome, covering, difference, first_difference, run_step
from tests.distributed.test_equality import words

PAIR = ParallelConfig(data=2, expert=2)
PRODUCT = [
    *(Case(family=each, degrees=PAIR, micro_batches=3) for each in ("mixtral_4", "mixtral_12", "qwen3_8")),
    *(Case(family=each, degrees=PAIR) for each in ("mixtral_bias", "mixtral_none")),
    *(
        Case(family="mixtral_4", degrees=ParallelConfig(shard=2, expert=2, zero_stage=stage), micro_batches=2)
        for stage in (1, 2, 3)  # type: ignore[arg-type]
    ),
    *(Case(family=each, degrees=ParallelConfig(context=2, expert=2), length=7) for each in ("mixtral_12", "qwen3_8")),
    Case(family="mixtral_4", degrees=ParallelConfig(context=2, expert=2), micro_batches=3, length=11),
    *(Case(family=each, degrees=PAIR, recompute="selective") for each in ("mixtral_4", "mixtral_12")),
    Case(family="qwen3_8", degrees=PAIR, recompute="full", micro_batches=2),
    # Four ranks: all experts apart, copies of experts, sharded copies, and each of the other axes.
    Case(family="qwen3_8", degrees=ParallelConfig(data=4, expert=4), micro_batches=3),
    *(Case(family=each, degrees=ParallelConfig(data=4, expert=2)) for each in ("mixtral_4", "mixtral_12")),
    *(
        Case(family=each, degrees=ParallelConfig(shard=4, expert=2, zero_stage=stage), micro_batches=2)
        for each, stage in (("mixtral_12", 2), ("qwen3_8", 3), ("mixtral_4", 1))
    ),
    Case(family="mixtral_4", degrees=ParallelConfig(shard=4, expert=4, zero_stage=2), micro_batches=2),
    *(Case(family="qwen3_8", degrees=ParallelConfig(data=2, shard=2, expert=each), micro_batches=2) for each in (2, 4)),
    *(
        Case(family=each, degrees=ParallelConfig(data=2, expert=2, tensor=2), micro_batches=2)
        for each in ("mixtral_12", "qwen3_8")
    ),
    Case(family="mixtral_4", degrees=ParallelConfig(shard=2, expert=2, tensor=2), recompute="selective"),
    Case(family="qwen3_8", degrees=ParallelConfig(data=2, expert=2, tensor=2, sequence_parallel=False), length=7),
    *(
        Case(family=each, degrees=ParallelConfig(context=2, expert=2, tensor=2), length=11)
        for each in ("mixtral_12", "qwen3_8")
    ),
    *(
        Case(family="mixtral_12", degrees=ParallelConfig(shard=2, context=2, expert=each), length=7, micro_batches=2)
        for each in (2, 4)
    ),
    # Ranks whose experts get no token, in blocks that are computed again too.
    Case(family="mixtral_4", degrees=ParallelConfig(data=4, expert=4), has_equal_scores=True),
    Case(family="mixtral_12", degrees=ParallelConfig(shard=4, expert=2), has_equal_scores=True, recompute="full"),
    Case(family="qwen3_8", degrees=ParallelConfig(shard=2, context=2, expert=4), has_equal_scores=True, length=7),
]
CASES = covering(PRODUCT)


def name_of(case: Case) -> str:
    tied = "-tied" if case.has_equal_scores else ""
    return f"{words(case)}-{case.length}-{case.recompute}{tied}"


@cache
def alone(family: str, length: int, has_equal_scores: bool = False) -> Outcome:
    torch.set_num_threads(1)
    case = Case(family=family, degrees=ParallelConfig(), length=length, has_equal_scores=has_equal_scores)
    return run_step(0, case)


def steps(rank: int, cases: list[Case]) -> list[Outcome]:
    return [run_step(rank, case) for case in cases]


@pytest.fixture(scope="module")
def launched() -> dict[int, list[list[Outcome]]]:
    torch.set_num_threads(1)
    by_size = {size: [case for case in CASES if case.degrees.world_size == size] for size in (2, 4)}
    return {size: run_ranks(size, steps, cases) for size, cases in by_size.items()}


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_divided_experts_equal_those_of_one_process(launched: dict[int, list[list[Outcome]]], case: Case) -> None:
    size, one = case.degrees.world_size, alone(case.family, case.length, case.has_equal_scores)
    number = [each for each in CASES if each.degrees.world_size == size].index(case)
    outcomes = [rank[number] for rank in launched[size]]
    assert first_difference([each.order for each in outcomes]) is None
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, outcome.regions[name].of(one.weights[name])), name
        assert difference(outcome, one) < 1e-9


def test_selective_recomputation_repeats_no_exchange(launched: dict[int, list[list[Outcome]]]) -> None:
    def exchanges(case: Case) -> int:
        number = [each for each in CASES if each.degrees.world_size == 2].index(case)
        return launched[2][0][number].count("c10d::alltoall_base_")

    # Two blocks: the counts, the rows and the results, and in the backward pass the latter two.
    assert exchanges(Case(family="mixtral_none", degrees=PAIR)) == 2 * 5
    assert exchanges(Case(family="mixtral_4", degrees=PAIR, recompute="selective")) == 2 * 5
    # Of three blocks two have experts, and there are two micro-batches.
    assert exchanges(Case(family="qwen3_8", degrees=PAIR, recompute="full", micro_batches=2)) == 2 * 2 * 8


def test_a_case_is_what_its_name_says() -> None:
    assert len({dataclasses.astuple(case) for case in PRODUCT}) == len(PRODUCT)


def test_equal_scores_leave_experts_without_a_token() -> None:
    for name, gradient in alone("mixtral_4", 8, has_equal_scores=True).gradients.items():
        if ".experts." in name:
            assert [bool(each.any()) for each in gradient] == [True, True, False, False]
