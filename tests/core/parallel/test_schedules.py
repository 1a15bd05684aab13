"""The orders of passes, without ranks: torch's own, messages that both ends expect alike, and no waiting in a ring."""

import random

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from kitforge.core.parallel.schedules import Pass, one_f_one_b

DRAWN = [(stages, count) for stages in (1, 2, 3, 4, 7) for count in (1, 2, 3, 5, 16)]


def orders(num_stages: int, count: int) -> list[list[Pass]]:
    return [one_f_one_b(stage, num_stages, count) for stage in range(num_stages)]


@pytest.mark.parametrize(("num_stages", "count"), DRAWN)
def test_every_stage_has_two_passes_of_each_micro_batch_in_their_order(num_stages: int, count: int) -> None:
    for stage, order in enumerate(orders(num_stages, count)):
        for kind in ("F", "B"):
            assert [each.micro_batch for each in order if each.kind == kind] == list(range(count))
        flights, most = 0, 0
        for each in order:
            flights += 1 if each.kind == "F" else -1
            assert flights >= 0
            most = max(most, flights)
        assert most == min(num_stages - stage, count)


@pytest.mark.parametrize(("num_stages", "count"), [(2, 4), (3, 5), (4, 4), (4, 9)])
def test_the_order_is_that_of_torch(num_stages: int, count: int) -> None:
    names = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for own, found in zip(orders(num_stages, count), get_schedule_ops("1F1B", num_stages, count, 1), strict=True):
        wanted = [
            (names[each.computation_type.name], each.microbatch_index)
            for each in found
            if each is not None and each.computation_type.name in names
        ]
        # torch, which draws this list and runs another one, numbers the forward passes of the last stage from 1.
        is_last = own[0].kind != own[1].kind
        assert own == [(kind, each - (kind == "F" and is_last)) for kind, each in wanted]


@pytest.mark.parametrize(("num_stages", "count"), DRAWN)
def test_both_ends_of_a_way_have_its_messages_in_one_order(num_stages: int, count: int) -> None:
    found = orders(num_stages, count)
    for low in range(num_stages - 1):
        for kind in ("F", "B"):
            # A forward pass of the lower stage sends what one of the higher receives, and backward the other way.
            ends = [[each.micro_batch for each in found[stage] if each.kind == kind] for stage in (low, low + 1)]
            assert ends[0] == ends[1]


def test_passes_end_whoever_runs_first() -> None:
    """Stages that wait for what they receive and for nothing else, in drawn turns."""
    drawn = random.Random(3)
    for num_stages, count in DRAWN:
        waiting, done = [list(each) for each in orders(num_stages, count)], set[tuple[int, Pass]]()
        while any(waiting):
            ready = [
                stage for stage, order in enumerate(waiting) if order and is_ready(stage, order[0], num_stages, done)
            ]
            assert ready, (num_stages, count)
            stage = drawn.choice(ready)
            done.add((stage, waiting[stage].pop(0)))


def is_ready(stage: int, one: Pass, num_stages: int, done: set[tuple[int, Pass]]) -> bool:
    source = stage - 1 if one.kind == "F" else stage + 1
    return source in (-1, num_stages) or (source, one) in done
