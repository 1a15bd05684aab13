"""The context axis: rows cut over ranks equal whole rows.

One launch for each number of ranks runs all steps of that number.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.context import Context
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import sharding_of_network
from tests.distributed.ranks import run_ranks
from tests.distributed.step import (
    FAMILIES,
    GROUPED,
    Case,
    Outcome,
    covering,
    difference,
    first_difference,
    init_sharded,
    run_step,
)
from tests.distributed.test_equality import words

PAIR, QUARTER = ParallelConfig(context=2), ParallelConfig(context=4)
WITH_TENSOR = ParallelConfig(context=2, tensor=2)
# Rows of 8 tokens, which the ranks divide, and of 7 and 11, which they do not.
PRODUCT = [
    *(Case(family=each, degrees=PAIR, micro_batches=3) for each in ("gpt2", "llama", "bloom", "glm", "pangu_alpha")),
    *(Case(family=each, degrees=PAIR, length=7) for each in ("gpt2", "llama_tied", "mixtral_shared", "bloom")),
    *(Case(family=each, degrees=PAIR, micro_batches=2, length=11) for each in ("grouped_4_1", "qwen3_moe")),
    *(Case(family=each, degrees=WITH_TENSOR, micro_batches=2) for each in ("gpt2", "llama", "bloom", "glm", "mixtral")),
    *(Case(family=each, degrees=WITH_TENSOR, length=11) for each in ("gpt2", "mixtral_shared")),
    Case(family="llama", degrees=ParallelConfig(context=2, tensor=2, sequence_parallel=False), length=7),
    *(Case(family=each, degrees=QUARTER, length=11) for each in ("grouped_4_1", "grouped_8_2", "grouped_12_3")),
    *(Case(family=each, degrees=QUARTER) for each in ("bloom", "mixtral")),
    *(
        Case(family=each, degrees=ParallelConfig(shard=2, context=2), micro_batches=3)
        for each in ("gpt2", "bloom", "mixtral")
    ),
    *(
        Case(
            family="llama_tied", degrees=ParallelConfig(shard=2, context=2, zero_stage=stage), micro_batches=2, length=7
        )
        for stage in (1, 2)  # type: ignore[arg-type]
    ),
    *(
        Case(family=each, degrees=ParallelConfig(data=2, context=2), micro_batches=2)
        for each in ("llama", "glm", "mixtral")
    ),
    Case(family="gpt2", degrees=WITH_TENSOR, recompute="selective"),
    Case(family="mixtral_shared", degrees=PAIR, recompute="full", length=7),
]
CASES = covering(PRODUCT)
LENGTHS = (1, 3, 8, 11)


@cache
def alone(family: str, length: int) -> Outcome:
    torch.set_num_threads(1)
    return run_step(0, Case(family=family, degrees=ParallelConfig(), length=length))


def network(name: str, world: World) -> Any:
    model = build_on_meta((FAMILIES | GROUPED)[name], "O1").double()
    return init_sharded(model, sharding_of_network(model), world, 0).eval()


def rows_of(model: Any, length: int) -> Tensor:
    tokens = torch.arange(2 * length).view(2, length) % 50
    with torch.no_grad():
        hidden: Tensor = model.hidden(tokens)
    return hidden


def answers(model: Any) -> Tensor:
    """Hidden states of three answers of 4 tokens to a prompt of 3, which is computed once."""
    tokens = (torch.arange(21).view(3, 7) * 5) % 50
    tokens[:, :3] = torch.tensor([7, 3, 9])
    mask = torch.arange(7).expand(3, -1).ge(2)
    with torch.no_grad():
        return hidden_at(model, tokens, mask)


def neighbours(model: Any) -> list[Tensor]:
    """The second document of a row, which begins before the cut, behind two different first ones of 3 tokens."""
    documents, positions = torch.tensor([[0] * 3 + [1] * 7]), torch.tensor([[0, 1, 2, *range(7)]])
    seconds = []
    for first in ([1, 2, 3], [30, 20, 10]):
        tokens = torch.tensor([[*first, *range(20, 27)]])
        with torch.no_grad():
            seconds.append(model.hidden(tokens, Context.packed(positions, documents))[:, 3:])
    return seconds


def steps(rank: int, cases: list[Case]) -> dict[str, Any]:
    """What this rank has of all steps; for two ranks also networks in evaluation."""
    found: dict[str, Any] = {"steps": [run_step(rank, case) for case in cases]}
    world = World(device=torch.device("cpu"), mesh=Mesh(PAIR if cases[0].degrees == PAIR else QUARTER, "cpu"))
    models = {name: network(name, world) for name in ("gpt2", "grouped_4_1")}
    found["rows"] = {(name, n): rows_of(each, n) for name, each in models.items() for n in LENGTHS}
    found["answers"] = {name: answers(each) for name, each in models.items()}
    found["neighbours"] = neighbours(models["gpt2"])
    return found


@pytest.fixture(scope="module")
def launched() -> dict[int, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    by_size = {size: [case for case in CASES if case.degrees.world_size == size] for size in (2, 4)}
    return {size: run_ranks(size, steps, cases) for size, cases in by_size.items()}


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{words(case)}-{case.length}-{case.recompute}")
def test_cut_rows_equal_whole_rows(launched: dict[int, list[dict[str, Any]]], case: Case) -> None:
    size, one = case.degrees.world_size, alone(case.family, case.length)
    number = [each for each in CASES if each.degrees.world_size == size].index(case)
    outcomes = [rank["steps"][number] for rank in launched[size]]
    assert first_difference([each.order for each in outcomes]) is None
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert torch.equal(weight, outcome.regions[name].of(one.weights[name])), name
        assert difference(outcome, one) < 1e-9


def test_rows_of_any_length_are_padded_and_never_wrong(launched: dict[int, list[dict[str, Any]]]) -> None:
    for name, length in launched[2][0]["rows"]:
        wanted = rows_of(network(name, World(device=torch.device("cpu"))), length)
        for rank in launched[2]:
            torch.testing.assert_close(rank["rows"][name, length], wanted, rtol=0, atol=1e-12)


def test_rows_with_a_common_prefix_are_cut_too(launched: dict[int, list[dict[str, Any]]]) -> None:
    for name, found in launched[2][0]["answers"].items():
        wanted = answers(network(name, World(device=torch.device("cpu"))))
        for rank in (*launched[2], *launched[4]):
            torch.testing.assert_close(rank["answers"][name], wanted, rtol=0, atol=1e-12)
        assert len(found) == 15


def test_a_neighbour_across_the_cut_changes_no_bit(launched: dict[int, list[dict[str, Any]]]) -> None:
    for rank in (*launched[2], *launched[4]):
        one, other = rank["neighbours"]
        assert torch.equal(one, other)


def test_attention_sends_one_message_each_way(launched: dict[int, list[dict[str, Any]]]) -> None:
    case = Case(family="gpt2", degrees=PAIR, micro_batches=3)
    number = [each for each in CASES if each.degrees.world_size == 2].index(case)
    outcome: Outcome = launched[2][0]["steps"][number]
    # Two blocks, three micro-batches: two exchanges in the forward pass and two in the backward pass of each.
    assert outcome.count("c10d::alltoall_base_") == 2 * 3 * 4
    # The output of `hidden`.
    assert outcome.count("c10d::_allgather_base_") == outcome.count("c10d::_reduce_scatter_base_") == 3


def test_a_case_is_what_its_name_says() -> None:
    assert len({dataclasses.astuple(case) for case in PRODUCT}) == len(PRODUCT)
