"""The context axis: rows cut over ranks equal whole rows.

One launch for each number of ranks runs all steps of that number.
"""

import dataclasses
import math
import random
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.context import Context
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.core.parallel import context as context_axis
from kitforge.core.parallel import row_cut
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.context import num_head_groups
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.models.bert.model import BertConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import sharding_of_network
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks, run_ranks
from tests.distributed.step import (
    ALL,
    BY_GROUPS,
    FAMILIES,
    FEW,
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
    Case(family="grouped_4_1", degrees=PAIR, length=11, micro_batches=2, is_tokenwise=True),
    Case(family="gpt2", degrees=WITH_TENSOR, length=7, is_tokenwise=True),
    Case(family="mixtral_shared", degrees=PAIR, recompute="full", length=7),
]
CASES = covering(PRODUCT)
LENGTHS = (1, 3, 8, 11)
BY_KEYS = [ParallelConfig(context=each, context_by="keys") for each in (2, 4)]
WITH_KEYS = [
    *BY_KEYS,
    *BY_KEYS,
    *(ParallelConfig(context=2, context_by="keys", data=each, shard=2 // each) for each in (1, 2)),
    *(ParallelConfig(context=2, context_by="keys", tensor=2, sequence_parallel=each) for each in (False, True)),
    ParallelConfig(context=4, context_by="keys", expert=2),
    ParallelConfig(context=2, context_by="keys", shard=2, expert=4, zero_stage=2),
]


def drawn_keys(seed: int, count: int) -> list[Case]:
    """Legal combinations of networks, axes and lengths."""
    numbers, found = random.Random(seed), list[Case]()
    while len(found) < count:
        degrees = numbers.choice(WITH_KEYS)
        names = ["mixtral_4", "mixtral_12", "qwen3_8"] if degrees.expert > 1 else [*FAMILIES, *GROUPED, *FEW]
        family = numbers.choice([each for each in names if each != "t5"])
        if ALL[family].decoder().blocks[0].attention.num_kv_heads % degrees.tensor:
            continue
        found.append(
            Case(
                family=family,
                degrees=degrees,
                micro_batches=numbers.randint(1, 3),
                recompute=numbers.choice(["none", "none", "selective", "full"]),
                length=numbers.choice([2, 7, 8, 16, 19, 32, 33]),
                is_tokenwise=numbers.random() < 0.5,
            )
        )
    return found


KEYS = [
    Case(family="llama_2", degrees=BY_KEYS[1], length=37),
    Case(family="bloom_2", degrees=BY_KEYS[1], length=32, micro_batches=2),
    Case(family="mixtral_shared", degrees=BY_KEYS[1], length=40),
    Case(family="gpt2", degrees=BY_KEYS[0], length=16, recompute="selective"),
    Case(family="gpt2", degrees=ParallelConfig(context=2, context_by="keys", tensor=2), length=16),
    *drawn_keys(5, 200 if WHOLE else 5),
]


def drawn_heads(seed: int, count: int) -> list[tuple[Case, int]]:
    """Legal combinations of networks, axes and lengths, and the bytes of a message, so that heads are in groups."""
    numbers, found = random.Random(seed), list[tuple[Case, int]]()
    axes = [{}, {}, {"context": 4}, {"data": 2}, {"shard": 2, "zero_stage": 2}, {"shard": 2}, {"tensor": 2}]
    names = [*BY_GROUPS, "llama_tied", "mixtral_shared", "qwen3_moe", "glm"]
    while len(found) < count:
        degrees, family = ParallelConfig(**{"context": 2, **numbers.choice(axes)}), numbers.choice(names)
        attention = ALL[family].decoder().blocks[0].attention
        own_heads, kv_heads = (each // degrees.tensor for each in (attention.num_heads, attention.num_kv_heads))
        if attention.num_kv_heads % degrees.tensor or own_heads // degrees.context < 2:
            continue
        case = Case(
            family=family,
            degrees=degrees,
            micro_batches=numbers.randint(1, 3),
            recompute=numbers.choice(["none", "selective", "full"]),
            length=numbers.choice([2, 7, 8, 16, 19, 32, 33]),
            is_tokenwise=numbers.random() < 0.5,
        )
        found.append((case, numbers.choice([1, 2**12])))
    return found


GROUPS = [
    (Case(family="llama_by_groups", degrees=PAIR, length=16, recompute="selective"), 1),
    (Case(family="grouped_8_2_by_groups", degrees=PAIR, length=11, micro_batches=2), 1),
    (Case(family="bloom_by_groups", degrees=PAIR, length=16, recompute="full"), 1),
    (Case(family="gpt2", degrees=PAIR), 1),
    *drawn_heads(6, 200 if WHOLE else 4),
]
ENCODERS = {"bert": BertConfig(vocab_size=50, dim=16, num_layers=2, num_heads=4, mlp_dim=26, max_length=32)}
# Pairs that a key is worth: rows are cut by work, and in neighbouring pieces.
PRICES = (0, 10**9)


@cache
def alone(family: str, length: int) -> Outcome:
    torch.set_num_threads(1)
    return run_step(0, Case(family=family, degrees=ParallelConfig(), length=length))


def network(name: str, world: World) -> Any:
    model = build_on_meta((ALL | ENCODERS)[name], "O1").double()
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


def encoded(model: Any) -> list[Tensor]:
    return [*(rows_of(model, length) for length in LENGTHS), *neighbours(model)]


def at_price(price: int, rank: int, case: Case) -> Outcome:
    with mock.patch.object(row_cut, "PAIRS_PER_KEY", price):
        return run_step(rank, case)


def in_groups(rank: int, case: Case, group_bytes: int) -> tuple[Outcome, Outcome]:
    """With heads in one piece, and in groups."""
    one = run_step(rank, case)
    with mock.patch.object(context_axis, "GROUP_BYTES", group_bytes):
        return one, run_step(rank, case)


def shares_keys(case: Case, one: Outcome, found: Outcome) -> bool:
    """Whether a rank has more groups than heads of keys."""
    attention, degrees = ALL[case.family].decoder().blocks[0].attention, case.degrees
    kv_heads = math.lcm(attention.num_kv_heads // degrees.tensor, degrees.context) // degrees.context
    return found.count("c10d::alltoall_base_") > kv_heads * one.count("c10d::alltoall_base_")


def steps(rank: int, cases: list[Case]) -> dict[str, Any]:
    """What this rank has of all steps; for two ranks also networks in evaluation."""
    found: dict[str, Any] = {"steps": [run_step(rank, case) for case in cases]}
    size = cases[0].degrees.world_size
    by_keys = [case for case in KEYS if case.degrees.world_size == size]
    found["keys"] = {price: [at_price(price, rank, case) for case in by_keys] for price in PRICES}
    meshes = Mesh(PAIR if size == 2 else QUARTER, "cpu"), Mesh(BY_KEYS[size == 4], "cpu")
    for by, mesh in zip(("heads", "keys"), meshes, strict=True):
        world = World(device=torch.device("cpu"), mesh=mesh)
        models = {name: network(name, world) for name in ("gpt2", "grouped_4_1")}
        found["rows", by] = {(name, n): rows_of(each, n) for name, each in models.items() for n in LENGTHS}
        found["answers", by] = {name: answers(each) for name, each in models.items()}
        found["neighbours", by] = neighbours(models["gpt2"])
        found["encoder", by] = encoded(network("bert", world))
    return found


@pytest.fixture(scope="module")
def launched() -> dict[int, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    by_size = {size: [case for case in CASES if case.degrees.world_size == size] for size in (2, 4)}
    return {size: run_ranks(size, steps, cases) for size, cases in by_size.items()}


@pytest.fixture(scope="module")
def grouped() -> dict[int, list[tuple[Outcome, Outcome]]]:
    """By number in `GROUPS`: on each rank, heads in one piece and in groups. A launch of its own: seconds for
    the faults that it is to find."""
    torch.set_num_threads(1)
    cases = dict(enumerate(GROUPS))
    return ask_ranks({number: (each[0].degrees.world_size, in_groups, *each) for number, each in cases.items()})


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


@pytest.mark.prove
@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("number", range(len(KEYS)), ids=str)
def test_gathered_keys_are_whole_rows(launched: dict[int, list[dict[str, Any]]], number: int, price: int) -> None:
    case = KEYS[number]
    size, one = case.degrees.world_size, alone(case.family, case.length)
    place = [each for each in KEYS if each.degrees.world_size == size].index(case)
    outcomes = [rank["keys"][price][place] for rank in launched[size]]
    assert first_difference([each.order for each in outcomes]) is None
    for outcome in outcomes:
        assert difference(outcome, one) < 1e-9


@pytest.mark.prove
@pytest.mark.parametrize("number", range(len(GROUPS)), ids=str)
def test_heads_in_groups_are_heads_in_one_piece(grouped: dict[int, list[tuple[Outcome, Outcome]]], number: int) -> None:
    case, _ = GROUPS[number]
    whole = alone(case.family, case.length)
    assert first_difference([found.order for _, found in grouped[number]]) is None
    for one, found in grouped[number]:
        assert difference(found, whole) < 1e-12
        assert found.loss == one.loss
        # The gradients of keys that several groups see are summed in another order.
        if not shares_keys(case, one, found):
            for name, gradient in found.gradients.items():
                assert torch.equal(gradient, one.gradients[name]), name


def test_groups_have_messages_of_their_own_and_dropout_of_weights_has_one_group(
    grouped: dict[int, list[tuple[Outcome, Outcome]]],
) -> None:
    # Groups of: 4 heads, 2 of keys on a rank; 4 and 1; 2 and 2; the last case drops weights.
    for place, groups in enumerate((4, 4, 2, 1)):
        one, found = grouped[place][0]
        names = ("c10d::alltoall_base_",)
        assert found.count(*names) == groups * one.count(*names) > 0
        assert shares_keys(GROUPS[place][0], one, found) == (groups == 4)


def test_groups_divide_heads_and_leave_each_message_its_bytes() -> None:
    numbers = random.Random(0)
    for _ in range(2000):
        kv_heads, each = numbers.randint(1, 12), numbers.randint(1, 12)
        heads, num_bytes = kv_heads * each, numbers.randint(0, 100) * context_axis.GROUP_BYTES // 4
        wanted = []
        for size in range(1, heads + 1):
            # The keys of each group: whole heads of them, or a part of the queries of one.
            seen = [{head // each for head in range(at, at + size)} for at in range(0, heads, size)]
            if heads % size == 0 and (size % each == 0 or all(len(keys) == 1 for keys in seen)):
                wanted.append(heads // size)
        most = max(1, num_bytes // context_axis.GROUP_BYTES)
        assert num_head_groups(heads, kv_heads, num_bytes) == max(groups for groups in wanted if groups <= most)


@pytest.mark.parametrize("by", ["heads", "keys"])
def test_rows_of_any_length_are_padded_and_never_wrong(launched: dict[int, list[dict[str, Any]]], by: str) -> None:
    for name, length in launched[2][0]["rows", by]:
        wanted = rows_of(network(name, World(device=torch.device("cpu"))), length)
        for rank in launched[2]:
            torch.testing.assert_close(rank["rows", by][name, length], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by", ["heads", "keys"])
def test_an_encoder_is_cut_too(launched: dict[int, list[dict[str, Any]]], by: str) -> None:
    one = network("bert", World(device=torch.device("cpu")))
    for rank in (*launched[2], *launched[4]):
        for found, wanted in zip(rank["encoder", by], encoded(one), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("by", ["heads", "keys"])
def test_rows_with_a_common_prefix_are_cut_too(launched: dict[int, list[dict[str, Any]]], by: str) -> None:
    for name, found in launched[2][0]["answers", by].items():
        wanted = answers(network(name, World(device=torch.device("cpu"))))
        for rank in (*launched[2], *launched[4]):
            torch.testing.assert_close(rank["answers", by][name], wanted, rtol=0, atol=1e-12)
        assert len(found) == 15


@pytest.mark.parametrize("by", ["heads", "keys"])
def test_a_neighbour_across_the_cut_changes_no_bit(launched: dict[int, list[dict[str, Any]]], by: str) -> None:
    for rank in (*launched[2], *launched[4]):
        one, other = rank["neighbours", by]
        assert torch.equal(one, other)


def test_attention_sends_one_message_each_way(launched: dict[int, list[dict[str, Any]]]) -> None:
    case = Case(family="gpt2", degrees=PAIR, micro_batches=3)
    number = [each for each in CASES if each.degrees.world_size == 2].index(case)
    outcome: Outcome = launched[2][0]["steps"][number]
    # Two blocks, three micro-batches: two exchanges in the forward pass and two in the backward pass of each.
    assert outcome.count("c10d::alltoall_base_") == 2 * 3 * 4
    # The output of `hidden`.
    assert outcome.count("c10d::_allgather_base_") == outcome.count("c10d::_reduce_scatter_base_") == 3


def test_keys_are_sent_once_each_way_and_again_for_a_recomputed_block(
    launched: dict[int, list[dict[str, Any]]],
) -> None:
    for case, passes in ((KEYS[0], 2), (KEYS[3], 3)):
        size = case.degrees.world_size
        place = [each for each in KEYS if each.degrees.world_size == size].index(case)
        outcome: Outcome = launched[size][0]["keys"][0][place]
        assert outcome.count("c10d::alltoall_base_") == ALL[case.family].num_layers * passes
        assert outcome.count("c10d::_allgather_base_") == outcome.count("c10d::_reduce_scatter_base_") == 1


def test_a_case_is_what_its_name_says() -> None:
    assert len({dataclasses.astuple(case) for case in PRODUCT}) == len(PRODUCT)
