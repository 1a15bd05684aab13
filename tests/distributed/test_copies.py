"""Two slices of a micro-batch that take turns: the gradients, losses and loads of two micro-batches, bit for bit."""

import random
import re
import threading
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kitforge.composition import compose_config, parse
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.linear_cross_entropy import vocabulary
from kitforge.core.nn.context import Context, DropoutKey, EncoderInput
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.micro_batches import run_micro_batches
from kitforge.core.parallel.sharding import check_geometry
from kitforge.foundation.errors import ConfigError
from kitforge.kits.registry import kit_of
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.precision import autocast
from tests.differential.drawn import WHOLE
from tests.distributed import stages
from tests.distributed.ranks import run_ranks
from tests.distributed.stages import IGNORED, TokenLoss
from tests.distributed.step import ALL, Messages, Order, first_difference, world_of

RANKS = 4
# Degrees of four ranks with messages within a pass.
DEGREES: list[dict[str, Any]] = [
    {"tensor": 2, "data": 2},
    {"tensor": 2, "shard": 2, "zero_stage": 1},
    {"tensor": 2, "shard": 2, "zero_stage": 2},
    {"context": 2, "tensor": 2},
    {"context": 2, "data": 2, "context_by": "keys"},
    {"data": 4, "expert": 4},
    {"data": 2, "tensor": 2, "expert": 2},
    {"data": 2, "context": 2, "expert": 2},
    {"shard": 2, "data": 2, "expert": 2, "zero_stage": 1},
    {"shard": 2, "tensor": 2, "expert": 2, "zero_stage": 2},
    {"tensor": 2, "data": 2, "sequence_parallel": False},
    {"tensor": 4},
    {"context": 4},
    {"context": 2, "tensor": 2, "context_by": "keys"},
    {"context": 2, "shard": 2, "zero_stage": 1},
    {"context": 2, "shard": 2, "zero_stage": 2},
    {"data": 4, "expert": 2},
    {"context": 2, "data": 2, "expert": 4, "context_by": "keys"},
    {"shard": 4, "expert": 2, "zero_stage": 2},
]
# With stages: a backward pass of one micro-batch beside a forward pass of another.
PAIRED: list[dict[str, Any]] = [
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "context": 2, "schedule": "zero_bubble_v"},
    {"pipeline": 2, "shard": 2, "expert": 2, "zero_stage": 1},
    {"pipeline": 2, "data": 2, "expert": 2, "schedule": "interleaved"},
    {"pipeline": 2, "tensor": 2, "schedule": "zero_bubble_v"},
    {"pipeline": 2, "context": 2, "context_by": "keys"},
    {"pipeline": 2, "shard": 2, "expert": 2, "zero_stage": 1, "schedule": "zero_bubble"},
    {"pipeline": 2, "tensor": 2, "sequence_parallel": False, "schedule": "zero_bubble"},
]
NUM_IN_GATE, NUM_PAIRED_IN_GATE = 9, 4
# Of those in the gate, cases whose axes others have.
LEFT_OUT = (6, 7, 8, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step in slices."""

    family: str
    degrees: dict[str, Any] = field(default_factory=dict)
    slices: int = 2  # of each replica; the last of an odd number has no other
    recompute: Recompute = "none"
    precision: Any = "fp64"  # bf16: of products, over weights in fp32
    is_tokenwise: bool = False

    def all_degrees(self, copies: Any) -> ParallelConfig:
        return ParallelConfig(**self.degrees, copies=copies)


class SliceLoss(TokenLoss):
    """That of tokens, with the sources of an encoder."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def inputs(self, micro_batch: Any) -> tuple[Tensor, Context]:
        part, key = micro_batch, DropoutKey(seed=0, step=0, samples=micro_batch["samples"])
        context = Context.packed(part["positions"], part["documents"], key, counted=part["targets"] != IGNORED)
        if self.case.family == "t5":
            source = EncoderInput(tokens=part["sources"], documents=part["source_documents"])
            context = replace(context, source=source)
        return part["tokens"], replace(context, is_tokenwise=self.case.is_tokenwise)


def can_run(case: Case) -> bool:
    network = build_on_meta(replace(ALL[case.family], num_layers=4), "O1")
    try:
        check_geometry(sharding_of_network(network), network.geometry, case.all_degrees(1))
    except ConfigError:
        return False
    is_composed = "pipeline" not in case.degrees
    return case.family != "t5" or (is_composed and not case.degrees.get("sequence_parallel", True))


@cache
def drawn_cases() -> list[Case]:
    """The first sets of degrees, in `make prove` each of them forty times, with whatever else is drawn."""
    draw, found = random.Random(7), list[Case]()
    sample = DEGREES[:NUM_IN_GATE] + PAIRED[:NUM_PAIRED_IN_GATE]
    for degrees in (DEGREES + PAIRED) * 40 if WHOLE else sample:
        while True:
            case = Case(
                family=draw.choice([*ALL]),
                degrees=degrees,
                slices=draw.choice((2, 3, 4)),
                recompute=draw.choice(("none", "selective", "full")),
                precision=draw.choice(("fp64", "fp32", "bf16")),
                is_tokenwise=draw.random() < 0.5,
            )
            if can_run(case):
                found.append(case)
                break
    return [case for number, case in enumerate(found) if WHOLE or number not in LEFT_OUT]


def step_of(case: Case, copies: int, takes_turns: bool = True) -> tuple[dict[str, Tensor], Order, Any]:
    """What this rank has of a step: sums, norm and gradients."""
    world, precision = world_of(case.all_degrees(copies)), "bf16" if case.precision == "bf16" else "fp32"
    world = replace(world, precision=precision)
    own = stages.Case(
        family=case.family, degrees={"pipeline": 1}, micro_batches=case.slices, num_layers=4, recompute=case.recompute
    )
    _, parallel = stages.built(own, world, torch.float64 if case.precision == "fp64" else torch.float32)
    parts = list(stages.micro_batches(own, world.replica, world.num_replicas))
    if not takes_turns:
        parallel.slices_pay = False
    # Logits of a few tokens at once, of which slices of different lengths have different numbers.
    with Messages() as messages, mock.patch.object(vocabulary, "CHUNK_BYTES", 400):
        sums = run_micro_batches(parallel, SliceLoss(case), parts, 0.01, partial(autocast, world.device, precision))
    found = {f"sum of {name}": each for name, each in sums.items()} | {"norm": parallel.grad_norm()}
    for name, each in parallel.parameters().items():
        found[name] = torch.tensor(0) if each.grad is None else each.grad
    # What one stage sends the next one receives: of these two ranks each has the other half.
    order = {
        key: [each for each in own if each[0] not in ("c10d::send", "c10d::recv_")]
        for key, own in messages.order.items()
    }
    return found, order, parallel


def of_split_backward(rank: int, case: Case) -> list[str]:
    """The values of a step whose gradients of weights come alone that are not those of whole backward passes."""
    (wanted, *_), (found, *_) = (
        step_of(replace(case, degrees=case.degrees | {"schedule": name}), 1) for name in ("1f1b", "zero_bubble")
    )
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def differing(rank: int, cases: list[Case]) -> list[tuple[list[str], Order, int, bool | None]]:
    """Of each case the values that are not those of slices one after another, bit for bit."""
    answers = []
    for case in cases:
        # ZeRO 2 sums the gradients of two slices before ranks do.
        wanted, *_ = step_of(case, 2, takes_turns=False) if case.degrees.get("zero_stage") == 2 else step_of(case, 1)
        found, order, parallel = step_of(case, 2)
        names = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        answers.append((names, order, threading.active_count(), parallel.slices_pay))
    return answers


def answers(rank: int) -> tuple[list[Any], list[str]]:
    """Of all cases, in one start of ranks."""
    degrees = {"pipeline": 2, "shard": 2, "expert": 2, "zero_stage": 1}
    split = Case(family="mixtral_4", degrees=degrees, slices=4, precision="bf16")
    return differing(rank, drawn_cases()), of_split_backward(rank, split)


@cache
def launched() -> list[tuple[list[Any], list[str]]]:
    torch.set_num_threads(1)
    return run_ranks(RANKS, answers)


@pytest.mark.slow
@pytest.mark.prove
def test_turns_have_the_bits_of_slices_one_after_another() -> None:
    for number, case in enumerate(drawn_cases()):
        for rank, _ in launched():
            names, _, _, pays = rank[number]
            assert (names, pays) == ([], False), case


@pytest.mark.slow
def test_all_ranks_have_their_collectives_in_one_order_and_no_thread_stays() -> None:
    for number, case in enumerate(drawn_cases()):
        answers = [rank[number] for rank, _ in launched()]
        assert first_difference([order for _, order, *_ in answers]) is None, case
        assert all(num_threads == launched()[0][0][0][2] for _, _, num_threads, _ in answers)


@pytest.mark.slow
def test_gradients_of_weights_that_come_alone_are_summed_in_fp32_under_bf16() -> None:
    assert [names for _, names in launched()] == [[]] * RANKS


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": 2}, r"(?s)copies.*got: +2\n.*1 without parallel.tensor, context or expert.*none to hide"),
    (
        {"tensor": 2, "shard": 2},
        r"(?s)zero_stage.*got: +3\n.*1 or 2 with parallel.copies=2.*do: .*zero_stage=2",
    ),
]


@pytest.mark.parametrize(("degrees", "words"), REFUSED)
def test_degrees_whose_slices_cannot_take_turns_are_refused(degrees: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**degrees, copies=2)
    ParallelConfig(**degrees)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("compile_level", "O2", r"(?s)got: +O2\n.*O0 or O1 with parallel.copies=2.*do: +compile_level=O1"),
        ("trainer.offload", "optimizer_and_gradients", r"(?s)none or optimizer with.*do: +trainer.offload=optimizer"),
        ("trainer.micro_batch_size", 1, r"(?s)2 or more with parallel.copies=2.*do: +trainer.micro_batch_size=2"),
        ("data.batch_size", 1, r"(?s)parallel.copies.*one row for each replica.*do: +data.batch_size=2"),
        ("model.experts.balance", "batch", r"(?s)balance=batch.*got: +2 micro-batches a step"),
    ],
)
def test_options_beside_which_slices_cannot_take_turns_are_refused(name: str, value: Any, words: str) -> None:
    kit = kit_of("text_generation")

    def check(choices: dict[str, Any]) -> None:
        is_mixture = name.startswith("model.experts")
        split = {"parallel.tensor": 2, "data.train": "text.txt", **choices}
        split["model"] = "llama_moe_tiny" if is_mixture else "llama_tiny"
        kit.check_parallel(kit.read_options(compose_config("text_generation", split).values))

    check({name: value})
    check({"parallel.copies": 2})
    with pytest.raises(ConfigError, match=words) as refused:
        check({name: value, "parallel.copies": 2})
    if advice := re.search(r"do: +([\w.]+=\w+)", str(refused.value)):
        name, (value,) = parse(advice[1])
        check({name: value, "parallel.copies": 2})
