"""The orders of passes, without ranks: torch's own, messages that both ends expect alike, no waiting in a ring, and the
waiting that the papers count."""

import itertools
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from kitforge.core.parallel.column import _apart
from kitforge.core.parallel.plan import stages
from kitforge.core.parallel.schedules import Pass, Pipeline, ScheduleName, idle_fraction, in_pairs
from tests.differential.drawn import WHOLE

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero_bubble", "zero_bubble_v")


def drawn(seed: int, most: int = 0) -> list[tuple[Pipeline, int]]:
    """Pipelines and numbers of micro-batches, each schedule in turn."""
    numbers, found = random.Random(seed), list[tuple[Pipeline, int]]()
    for number in range(most or (4000 if WHOLE else 120)):
        schedule = SCHEDULES[number % 4]
        chunks = {"interleaved": numbers.randint(2, 4), "zero_bubble_v": 2}.get(schedule, 1)
        found.append((Pipeline(numbers.randint(2, 8), schedule, chunks), numbers.randint(1, 20)))
    return found


def orders(pipeline: Pipeline, count: int) -> list[list[Pass]]:
    return [pipeline.passes(rank, count) for rank in range(pipeline.num_ranks)]


def most_in_flight(order: list[Pass], end: str) -> int:
    flights = [0]
    for each in order:
        flights.append(flights[-1] + (each.kind == "F") - (each.kind == end))
    return max(flights)


@pytest.mark.parametrize("seed", range(2))
def test_every_stage_has_each_pass_of_each_micro_batch_once(seed: int) -> None:
    for pipeline, count in drawn(seed):
        kinds = "FIW" if pipeline.splits_backward else "FB"
        for rank, order in enumerate(orders(pipeline, count)):
            own = pipeline.stages_of(rank)
            assert len(own) == pipeline.stages_per_rank
            wanted = {Pass(kind, stage, each) for kind in kinds for stage in own for each in range(count)}  # type: ignore[arg-type]
            assert len(order) == len(wanted)
            assert set(order) == wanted
            places = {each: place for place, each in enumerate(order)}
            for kind, after in zip(kinds, kinds[1:], strict=False):
                assert all(places[each] < places[each._replace(kind=after)] for each in order if each.kind == kind)  # type: ignore[arg-type]


def test_a_v_has_both_ends_on_one_rank() -> None:
    assert [Pipeline(3, "zero_bubble_v", 2).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [Pipeline(3, "interleaved", 2).stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_activations_are_bounded_whatever_the_number_of_micro_batches() -> None:
    for pipeline, count in drawn(2):
        p, chunks = pipeline.num_ranks, pipeline.stages_per_rank
        for rank, order in enumerate(orders(pipeline, count)):
            bound = {
                "1f1b": p - rank,
                "interleaved": (chunks - 1) * min(count, 2 * p - 1) + 2 * (p - rank - 1) + 1,
                "zero_bubble": p,
                "zero_bubble_v": 2 * p,
            }[pipeline.schedule]
            most = most_in_flight(order, "W" if pipeline.splits_backward else "B")
            assert most <= bound, (pipeline, count, rank)
            # As a plan counts them, by the layers of each stage.
            threes = dict.fromkeys(range(pipeline.num_stages), 3)
            assert stages.most_in_flight(pipeline, rank, count, threes) == 3 * most


def of_torch(name: str, pipeline: Pipeline, count: int) -> list[list[tuple[Any, ...]]]:
    chunks = pipeline.stages_per_rank
    return [
        [
            (KINDS[each.computation_type.name], each.stage_index, each.microbatch_index)
            for each in found
            if each is not None and each.computation_type.name in KINDS
        ]
        for found in get_schedule_ops(name, pipeline.num_ranks, count, chunks)
    ]


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 5), (4, 4), (4, 9)])
def test_1f1b_is_that_of_torch(ranks: int, count: int) -> None:
    pipeline = Pipeline(ranks)
    for own, found in zip(orders(pipeline, count), of_torch("1F1B", pipeline, count), strict=True):
        # torch, which draws this list and runs another one, numbers the forward passes of the last stage from 1.
        is_last = own[0].kind != own[1].kind
        wanted = [(kind, number - (kind == "F" and is_last)) for kind, _, number in found]
        assert [(each.kind, each.micro_batch) for each in own] == wanted


def test_the_orders_over_several_stages_are_those_of_torch() -> None:
    numbers, seen = random.Random(4), {"interleaved": 0, "zero_bubble_v": 0}
    for _ in range(600 if WHOLE else 60):
        ranks, count, chunks = numbers.randint(2, 6), numbers.randint(1, 16), numbers.randint(2, 4)
        v = Pipeline(ranks, "zero_bubble_v", 2)
        assert orders(v, count) == of_torch("ZBVZeroBubble", v, count)
        seen["zero_bubble_v"] += 1
        # torch refuses rounds of different sizes.
        if count % max(1, count // ranks) == 0:
            line = Pipeline(ranks, "interleaved", chunks)
            assert orders(line, count) == of_torch("Interleaved1F1B", line, count)
            seen["interleaved"] += 1
    assert min(seen.values()) > 10


def test_the_order_with_weights_apart_is_that_of_torch() -> None:
    """Torch has it for several stages a rank only; its own list, asked for one."""
    for pipeline, count in [(each, count) for each, count in drawn(5) if each.schedule == "zero_bubble"]:
        ranks = pipeline.num_ranks
        for rank, own in enumerate(orders(pipeline, count)):
            ahead = min(ranks - rank - 1, count)
            stage_of_step = [rank] * 2 * count
            here = stage_of_step.__getitem__
            found = torchs._get_1f1b_rank_ops(1, ranks, ahead, count - ahead, ahead, rank, here, here, rank, True)  # type: ignore[no-untyped-call]
            wanted = [(KINDS[x.computation_type.name], x.stage_index, x.microbatch_index) for x in found if x]
            assert own == wanted


def messages(order: list[Pass], pipeline: Pipeline, way: int, other: int, is_sent: bool) -> list[tuple[int, int]]:
    """The stage boundaries and micro-batches of a rank's messages to or from another one, upwards (1) or backwards."""
    found = []
    for kind, stage, number in order:
        end = stage + (way if is_sent else -way)
        has_message = (kind == "F") == (way == 1) and kind != "W" and 0 <= end < pipeline.num_stages
        if has_message and pipeline.rank_of(end) == other:
            found.append((min(stage, end), number))
    return found


@pytest.mark.parametrize("seed", range(2))
def test_both_ends_of_each_way_have_its_messages_in_one_order(seed: int) -> None:
    for pipeline, count in drawn(seed + 10):
        found, ranks = orders(pipeline, count), range(pipeline.num_ranks)
        for source, target in ((a, b) for a in ranks for b in ranks if a != b):
            for way in (1, -1):
                sent = messages(found[source], pipeline, way, target, is_sent=True)
                assert sent == messages(found[target], pipeline, way, source, is_sent=False), (pipeline, count)


def test_ways_are_made_in_few_lists_of_ranks_apart() -> None:
    """As many collective calls as there are lists, in each of which a rank is in one pair at most."""
    for pipeline, _ in drawn(30):
        ranks = [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)]
        lists = _apart(itertools.pairwise(ranks))
        pairs = [pair for each in lists for pair in each]
        assert sorted(pairs) == sorted({pair for pair in itertools.pairwise(ranks) if pair[0] != pair[1]})
        assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in lists)
        assert len(lists) <= 4


@pytest.mark.parametrize("seed", range(2))
def test_passes_end_whoever_runs_first(seed: int) -> None:
    """Ranks that wait for what they receive, and before a gradient of a stage until the last but one has been received,
    in drawn turns."""
    numbers = random.Random(seed)
    for pipeline, count in drawn(seed + 20):
        waiting, done = orders(pipeline, count), defaultdict[Any, list[Pass]](list)
        while any(waiting):
            ready = [rank for rank, order in enumerate(waiting) if order and is_ready(order[0], pipeline, done)]
            assert ready, (pipeline, count)
            one = waiting[numbers.choice(ready)].pop(0)
            done[one[:2]].append(one)


@pytest.mark.parametrize("seed", range(3))
def test_pairs_that_wait_for_the_messages_of_both_passes_end(seed: int) -> None:
    """Each pass once, kinds in their order; and a pair needs what others have sent before it, neither in it."""
    for pipeline, count in drawn(seed + 30):
        for order in orders(pipeline, count):
            units = list(in_pairs(order))
            assert all(after is None or before[0].kind != "F" == after.kind for before, after in units)
            assert [each for unit in units for each in _members(unit)] == order
        waiting, done = (
            [[*map(_members, in_pairs(order))] for order in orders(pipeline, count)],
            defaultdict[Any, list[Pass]](list),
        )
        while any(waiting):
            ready = [own for own in waiting if own and all(is_ready(each, pipeline, done) for each in own[0])]
            assert ready, (pipeline, count)
            for each in ready[0].pop(0):
                done[each[:2]].append(each)


def _members(unit: tuple[list[Pass], Pass | None]) -> list[Pass]:
    return [*unit[0], *([unit[1]] if unit[1] else [])]


def is_ready(one: Pass, pipeline: Pipeline, done: Mapping[Any, list[Pass]]) -> bool:
    """`done` by kind and stage."""
    if one.kind == "W":
        return True
    source = one.stage + (-1 if one.kind == "F" else 1)
    if 0 <= source < pipeline.num_stages and one._replace(stage=source) not in done[one.kind, source]:
        return False
    sent, before = done[one[:2]], one.stage - 1
    is_remote = one.stage > 0 and pipeline.rank_of(one.stage - 1) != pipeline.rank_of(one.stage)
    is_free = one.kind == "F" or len(sent) < 2 or not is_remote
    return is_free or sent[-2]._replace(stage=before) in done[one.kind, before]


def test_the_idle_fraction_is_the_formula() -> None:
    """Of the papers, where there are micro-batches for all stages: p - 1 times what a schedule waits at both ends."""
    for pipeline, count in drawn(6):
        p, chunks = pipeline.num_ranks, pipeline.stages_per_rank
        per_wait = {"1f1b": 1, "interleaved": chunks, "zero_bubble": 3, "zero_bubble_v": 6}[pipeline.schedule]
        formula = (p - 1) / (per_wait * count + p - 1)
        if count >= (2 * p - 1 if pipeline.schedule == "zero_bubble_v" else p):
            assert idle_fraction(pipeline, count) == pytest.approx(formula, rel=1e-9), (pipeline, count)
        else:
            assert idle_fraction(pipeline, count) >= formula - 1e-12


def test_the_page_has_these_numbers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text()
    for schedule in SCHEDULES:
        line = next(each for each in page.splitlines() if each.startswith(f"| `{schedule}` | (p - 1)"))
        pipeline = Pipeline(4, schedule, 2 if schedule in ("interleaved", "zero_bubble_v") else 1)
        assert line.split(" | ")[2:6] == [
            f"{idle_fraction(pipeline, count):.0%}".replace("%", " %") for count in (4, 8, 16, 32)
        ]
