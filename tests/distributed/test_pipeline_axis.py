"""Networks on stages compute what one process computes: in the order 1F1B, and by relay with any loss.

One launch of four ranks for the gate; `make prove` draws 200 combinations, and has each family.
"""

import random
from typing import Any

import pytest
import torch

from kitforge.core.parallel.expert_load import LOAD
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.distributed.stages import Case, alone, on_stages
from tests.distributed.step import FAMILIES, difference

DECODERS = [name for name in FAMILIES if name != "t5"]
BESIDE: list[dict[str, Any]] = [
    {"pipeline": 4},
    {"data": 2},
    *({"shard": 2, "zero_stage": stage} for stage in (1, 2, 3)),
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 2},
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
]
if WHOLE:
    CASES += [
        *(Case(family=family, degrees=each) for family in DECODERS for each in ({}, {"pipeline": 4})),
        *(Case(family="gpt2", degrees=each, micro_batches=count) for each in BESIDE[:-1] for count in (1, 2, 3, 5)),
        *(Case(family="gpt2", degrees=each, is_relayed=True) for each in BESIDE[:-1]),
        *(Case(family="qwen3_8", degrees=BESIDE[-1], is_relayed=is_relayed) for is_relayed in (False, True)),
    ]


def drawn(seed: int, count: int) -> list[Case]:
    """Legal combinations."""
    numbers, found = random.Random(seed), list[Case]()
    while len(found) < count:
        degrees = numbers.choice(BESIDE)
        family = numbers.choice(["mixtral_4", "mixtral_12", "qwen3_8"] if "expert" in degrees else DECODERS)
        num_layers = numbers.randint(4, 6)
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


ALL_CASES = [*CASES, *drawn(54, 200 if WHOLE else 6)]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> dict[int, list[Any]]:
    """Of the cases that are asked for, what each rank finds."""
    items: list[Any] = [each for each in request.session.items if each.path == request.path]
    chosen = sorted({each.callspec.params["number"] for each in items})
    return ask_ranks({each: (ALL_CASES[each].all_degrees.world_size, on_stages, ALL_CASES[each]) for each in chosen})


@pytest.mark.parametrize("number", range(len(ALL_CASES)), ids=str)
def test_stages_are_one_process(number: int, ranks: dict[int, list[Any]]) -> None:
    one = alone(ALL_CASES[number])
    for found in ranks[number]:
        assert difference(found, one) < 1e-9
        assert found.weights["rows"] == one.weights["rows"]
        assert (LOAD in one.weights) == (LOAD in found.weights)
        if LOAD in one.weights:
            assert torch.equal(found.weights[LOAD], one.weights[LOAD])
    assert set().union(*(found.gradients for found in ranks[number])) == set(one.gradients)
