"""Networks on stages compute what one process computes: in every order of passes, and by relay with any loss.

One launch of two ranks and one of four for the gate; `make prove` draws 2,000 combinations, and has each family in each
order. A launch has at most `PIECE` cases, and a test is named by the number of its case, so that a run can end at any
time and another one go on: KITFORGE_PROVE=1 KITFORGE_PROVE_CASES=300:600 runs those of these numbers.
"""

import functools
import itertools
import os
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.expert_load import LOAD
from kitforge.core.parallel.schedules import ScheduleName
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.distributed.stages import Case, alone, on_stages
from tests.distributed.step import FAMILIES, difference

DECODERS = [name for name in FAMILIES if name != "t5"]
SCHEDULES = get_args(ScheduleName)
BESIDE: list[dict[str, Any]] = [
    {},
    {"pipeline": 4},
    {"data": 2},
    *({"shard": 2, "zero_stage": stage} for stage in (1, 2, 3)),
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 2},
    {"context": 2, "context_by": "keys"},
    {"data": 2, "expert": 2},
]
# In the gate every axis, a tied head and one that is not, mixtures, one micro-batch and more than stages.
CASES = [
    Case(family="gpt2", degrees={"pipeline": 4}, micro_batches=5),
    Case(family="llama_tied", degrees={"shard": 2, "zero_stage": 2}, micro_batches=2),
    # Nothing is recomputed, so a load that is not read at once is that of a later micro-batch.
    Case(family="qwen3_8", degrees={"data": 2, "expert": 2}, micro_batches=4),
    Case(family="gpt2", degrees={"tensor": 2}, micro_batches=1),
    Case(
        family="llama", degrees={"pipeline": 4}, num_layers=6, frozen=("embedding", "blocks.0", "blocks.1", "blocks.2")
    ),
    Case(family="pangu_alpha", degrees={"context": 2}, is_relayed=True, micro_batches=2),
    # Ends on one rank, of which the first is not trained: it has no backward pass.
    Case(family="llama", degrees={"schedule": "zero_bubble_v"}, num_layers=6, frozen=("embedding", "blocks.0")),
    # Each chunk of a rank has its own load of experts, and a recomputation writes it again.
    Case(family="qwen3_8", degrees={"schedule": "interleaved"}, micro_batches=5, recompute="full"),
    Case(family="gpt2", degrees={"schedule": "interleaved", "stages_per_rank": 3}, num_layers=7),
    Case(family="mixtral", degrees={"schedule": "zero_bubble", "shard": 2, "zero_stage": 1}),
    Case(family="bloom", degrees={"context": 2, "context_by": "keys"}, micro_batches=3),
]
if WHOLE:
    CASES += [
        *(Case(family=family, degrees=each) for family in DECODERS for each in ({}, {"pipeline": 4})),
        *(
            Case(family=family, degrees={"schedule": schedule}, micro_batches=count)
            for family in DECODERS
            for schedule in SCHEDULES
            for count in (1, 2, 3, 5)
        ),
        # Copies of shards, whose parts of a gradient are summed when a stage, not the rank, has its last pass.
        *(
            Case(family="llama_tied", degrees={"data": 2, "shard": 2, "zero_stage": stage, "schedule": schedule})
            for schedule, stage in itertools.product(SCHEDULES[1:], (1, 2, 3))
            if stage < 3 or schedule == "interleaved"
        ),
        # Experts whose shards are units of their own, and three axes beside the stages.
        Case(family="mixtral_4", degrees={"shard": 4, "expert": 2, "zero_stage": 2, "schedule": "zero_bubble_v"}),
        Case(family="mixtral_4", degrees={"tensor": 2, "data": 2, "expert": 2, "schedule": "zero_bubble_v"}),
        Case(family="qwen3_8", degrees={"tensor": 2, "context": 2, "schedule": "zero_bubble"}, micro_batches=2),
        *(Case(family="gpt2", degrees=each, micro_batches=count) for each in BESIDE[:-1] for count in (1, 2, 3, 5)),
        *(Case(family="gpt2", degrees=each, is_relayed=True) for each in BESIDE[:-1]),
        *(Case(family="qwen3_8", degrees=BESIDE[-1], is_relayed=is_relayed) for is_relayed in (False, True)),
    ]


def drawn(seed: int, count: int) -> list[Case]:
    """Legal combinations, each order in turn."""
    numbers, found = random.Random(seed), list[Case]()
    while len(found) < count:
        schedule = SCHEDULES[len(found) % len(SCHEDULES)]
        legal = [each for each in BESIDE if each.get("zero_stage", 1) < 3 or not schedule.startswith("zero")]
        # One in two with two ranks alone, which take a third of the time of four.
        degrees = numbers.choice([{}, numbers.choice(legal)]) | {"schedule": schedule}
        if schedule == "interleaved" and "pipeline" not in degrees:
            degrees["stages_per_rank"] = numbers.choice([2, 3])
        family = numbers.choice(["mixtral_4", "mixtral_12", "qwen3_8"] if "expert" in degrees else DECODERS)
        stages = ParallelConfig(**{"pipeline": 2, **degrees}).stages.num_stages
        num_layers = numbers.randint(max(4, stages), max(4, stages) + 2)
        low = [f"blocks.{layer}." for layer in range(numbers.randint(1, num_layers - 1))]
        frozen: Any = numbers.choice([(), (), (), ("embedding", "position", *low), ("output", "norm"), ("blocks.1.",)])
        found.append(
            Case(
                family=family,
                degrees=degrees,
                is_relayed=numbers.random() < 0.4,
                micro_batches=numbers.randint(1, 6),
                num_layers=num_layers,
                recompute=numbers.choice(["none", "full", "selective"]),
                frozen=frozen,
            )
        )
    return found


ALL_CASES = [*CASES, *drawn(54, 2000 if WHOLE else 8)]
PIECE = 100
NUMBERS = range(len(ALL_CASES))
if WHOLE and (part := os.environ.get("KITFORGE_PROVE_CASES")):
    NUMBERS = NUMBERS[slice(*map(int, part.split(":")))]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Callable[[int], list[Any]]:
    """Of a case that is asked for, what each rank finds."""
    items: list[Any] = [each for each in request.session.items if each.path == request.path]
    chosen = sorted({each.callspec.params["number"] for each in items})

    @functools.cache
    def launched(piece: int) -> dict[int, list[Any]]:
        cases = {each: ALL_CASES[each] for each in chosen if each // PIECE == piece}
        return ask_ranks({each: (case.all_degrees.world_size, on_stages, case) for each, case in cases.items()})

    return lambda number: launched(number // PIECE)[number]


@pytest.mark.prove
@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_stages_are_one_process(number: int, ranks: Callable[[int], list[Any]]) -> None:
    one, outcomes = alone(ALL_CASES[number]), ranks(number)
    for found in outcomes:
        assert difference(found, one) < 1e-9
        assert found.weights["rows"] == one.weights["rows"]
        assert (LOAD in one.weights) == (LOAD in found.weights)
        if LOAD in one.weights:
            assert torch.equal(found.weights[LOAD], one.weights[LOAD])
    assert set().union(*(found.gradients for found in outcomes)) == set(one.gradients)
