"""From one arrangement to another in memory: what every rank ends with is what a cut of the whole would have given."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.checkpoint import reshard as module
from kitforge.core.checkpoint.arrangement import Arrangement, Ranks, owned
from kitforge.core.checkpoint.boxes import cut, num_elements, overlap, tile, within
from kitforge.core.checkpoint.reshard import Transfer, plan, reshard
from kitforge.core.checkpoint.tensor_file import DTYPE_NAMES
from kitforge.core.parallel.degrees import Degrees
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.types import Region
from tests.core.checkpoint import sharded
from tests.core.checkpoint.example import assert_equal
from tests.distributed.ranks import run_ranks

SQUARE, ROW, COLUMN = Degrees(shard=2, tensor=2), Degrees(tensor=4), Degrees(shard=4)


def whole() -> dict[str, Tensor]:
    return sharded.whole_model(1) | sharded.whole_optimizer(1)


def arrangement(degrees: Degrees, ranks: Ranks | None = None) -> Arrangement:
    """The example's tensors on a mesh of those degrees; a name that is not split is whole."""
    layouts = {name: Layout(shape=tuple(tensor.shape)) for name, tensor in whole().items()}
    split = sharded.layouts(degrees)
    split[sharded.TIED[0]] = split[sharded.TIED[1]]
    return Arrangement(layouts=layouts | split, ranks=ranks or Ranks.grid(degrees))


def cut_for(arranged: Arrangement, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank has in an arrangement, cut from the whole."""
    found = {name: arranged.ranks.region(layout, rank) for name, layout in arranged.layouts.items()}
    return {name: region.of(tensors[name]).clone() for name, region in found.items() if region is not None}


def assert_resharded(
    source: Arrangement, target: Arrangement, tensors: Mapping[str, Tensor], chunk_bytes: int = 2**20
) -> sharded.Stage:
    """All ranks, played by threads, end with the cut of the whole."""
    stage = sharded.Stage(source.ranks.size)

    def act(world: World) -> dict[str, Tensor]:
        given = cut_for(source, world.rank, tensors)
        return reshard(given, source, target, world=world, chunk_bytes=chunk_bytes)

    for rank, result in enumerate(stage.play(act)):
        if isinstance(result, Exception):
            raise result
        assert_equal(result, cut_for(target, rank, tensors))
    return stage


PAIRS = [(SQUARE, ROW), (ROW, SQUARE), (SQUARE, COLUMN), (COLUMN, Degrees(data=4)), (Degrees(data=4), SQUARE)]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda degrees: degrees.words())
@pytest.mark.parametrize("chunk_bytes", [1, 50, 2**20])
def test_every_rank_ends_with_its_pieces(before: Degrees, after: Degrees, chunk_bytes: int) -> None:
    assert_resharded(arrangement(before), arrangement(after), whole(), chunk_bytes)


def test_training_ranks_hand_over_to_other_ranks() -> None:
    trainers = arrangement(Degrees(shard=2), Ranks.grid(Degrees(shard=2), members=(0, 1), world=5))
    samplers = arrangement(Degrees(tensor=3), Ranks.grid(Degrees(tensor=3), members=(4, 2, 3)))
    assert_resharded(trainers, samplers, whole())
    assert_resharded(samplers, trainers, whole())


def test_ranks_that_train_may_be_among_those_that_sample() -> None:
    trainers = arrangement(Degrees(shard=3), Ranks.grid(Degrees(shard=3), members=(0, 1, 2), world=4))
    samplers = arrangement(Degrees(tensor=2), Ranks.grid(Degrees(tensor=2), members=(2, 3)))
    assert_resharded(trainers, samplers, whole())


def on_ranks(rank: int) -> None:
    before, after = arrangement(SQUARE), arrangement(ROW)
    world = sharded.world_of(SQUARE)
    assert world.mesh is not None
    assert Ranks.of(world.mesh).places == Ranks.grid(SQUARE).places
    given = cut_for(before, rank, whole())
    for chunk_bytes in (64, 2**20):
        assert_equal(reshard(given, before, after, world=world, chunk_bytes=chunk_bytes), cut_for(after, rank, whole()))


def test_real_ranks_end_with_their_pieces() -> None:
    run_ranks(4, on_ranks)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_passes_to_the_bit(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (7 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    layout = Layout(shape=(7,))
    ranks = Ranks.grid(Degrees(shard=2))
    before = Arrangement(layouts={"odd": layout.cut("shard", 0, 2), "byte": layout.cut("shard", 0, 2)}, ranks=ranks)
    after = Arrangement(layouts={"odd": layout, "byte": layout}, ranks=ranks)
    assert_resharded(before, after, {"odd": raw.view(dtype), "byte": torch.arange(7, dtype=torch.uint8)})


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[Arrangement, Arrangement, dict[str, Tensor]]:
    """Two arrangements of random tensors over one world, with any cuts, on any members."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    size = draw(st.integers(1, 4))

    def ranks() -> tuple[Ranks, Degrees]:
        members = draw(st.permutations(range(size)).flatmap(lambda order: st.just(order[: draw(st.integers(1, size))])))
        shard = draw(st.sampled_from([n for n in range(1, len(members) + 1) if len(members) % n == 0]))
        degrees = Degrees(shard=shard, tensor=len(members) // shard)
        return Ranks.grid(degrees, members=members, world=size), degrees

    def layout(shape: tuple[int, ...], degrees: Degrees) -> Layout:
        made = Layout(shape=shape)
        for axis in draw(st.permutations(["shard", "tensor"])) if shape else ():
            if draw(st.booleans()):
                made = made.cut(axis, draw(st.integers(0, len(shape) - 1)), getattr(degrees, axis))
        return made

    result = []
    for _ in range(2):
        placed, degrees = ranks()
        layouts = {f"tensor{number}": layout(shape, degrees) for number, shape in enumerate(shapes)}
        result.append(Arrangement(layouts=layouts, ranks=placed))
    dtypes = [torch.float32, torch.float16, torch.int64]
    tensors = {
        f"tensor{number}": torch.arange(int(np.prod(shape)), dtype=dtypes[number]).reshape(shape)
        for number, shape in enumerate(shapes)
    }
    return result[0], result[1], tensors


@pytest.mark.slow
@settings(max_examples=60)
@given(arranged=arrangements(), chunk_bytes=st.sampled_from([1, 20, 2**20]))
def test_any_two_arrangements(arranged: tuple[Arrangement, Arrangement, dict[str, Tensor]], chunk_bytes: int) -> None:
    assert_resharded(*arranged, chunk_bytes=chunk_bytes)


@settings(max_examples=60)
@given(arranged=arrangements())
def test_a_plan_gives_every_rank_each_element_once(
    arranged: tuple[Arrangement, Arrangement, dict[str, Tensor]],
) -> None:
    source, target, _ = arranged
    transfers = plan(source, target)
    for rank in range(target.ranks.size):
        for name, layout in target.layouts.items():
            wanted = target.ranks.region(layout, rank)
            got = [each.region for each in transfers if (each.name, each.target) == (name, rank)]
            if wanted is None or not num_elements(wanted):
                assert [each for each in got if num_elements(each)] == []
            else:
                assert tile([within(region, wanted) for region in got], Region.whole(wanted.shape))


def test_the_plan_is_the_same_whatever_the_order_of_names() -> None:
    before, after = arrangement(SQUARE), arrangement(ROW)
    turned = replace(after, layouts=dict(reversed(after.layouts.items())))
    assert plan(before, after) == plan(before, turned)


# Nothing moves that need not.


def test_one_process_gets_the_very_tensors_that_it_gave() -> None:
    tensors = whole()
    alone = arrangement(Degrees())
    result = reshard(tensors, alone, alone)
    assert all(result[name] is tensor for name, tensor in tensors.items())


def test_equal_arrangements_send_nothing_and_give_the_very_tensors() -> None:
    arranged, stage = arrangement(SQUARE), sharded.Stage(4)

    def act(world: World) -> bool:
        given = cut_for(arranged, world.rank, whole())
        result = reshard(given, arranged, arranged, world=world)
        return all(result[name] is tensor for name, tensor in given.items())

    assert stage.play(act) == [True] * 4
    assert stage.num_messages == 0


def test_a_rank_takes_what_it_has_from_itself() -> None:
    for transfer in plan(arrangement(Degrees(data=4)), arrangement(SQUARE)):
        assert transfer.source == transfer.target


def test_copies_share_the_giving() -> None:
    ranks = Ranks.grid(Degrees(data=2), members=(0, 1), world=4)
    layouts = {f"tensor{number}": Layout(shape=(10,)) for number in range(6)}
    takers = Arrangement(layouts=layouts, ranks=Ranks.grid(Degrees(data=2), members=(2, 3)))
    transfers = plan(Arrangement(layouts=layouts, ranks=ranks), takers)
    assert [sum(each.source == rank for each in transfers) for rank in range(4)] == [6, 6, 0, 0]


@pytest.mark.parametrize("chunk_bytes", [40, 200])
def test_no_message_is_larger_than_a_chunk(chunk_bytes: int) -> None:
    stage = assert_resharded(arrangement(SQUARE), arrangement(ROW), whole(), chunk_bytes)
    assert 0 < stage.largest <= chunk_bytes


# Bad input, and planted faults.


def test_moments_that_are_left_out_are_missed() -> None:
    before, after = arrangement(SQUARE), arrangement(ROW)
    weights = {name: layout for name, layout in after.layouts.items() if not name.endswith("exp_avg_sq")}
    with pytest.raises(ModelError, match=r"not the same\n.*5 missing \(down.weight.exp_avg_sq"):
        plan(before, replace(after, layouts=weights))


def test_tensors_of_another_shape_are_refused() -> None:
    before, after = arrangement(SQUARE), arrangement(ROW)
    layouts = {**after.layouts, "norm.weight": Layout(shape=(6,))}
    with pytest.raises(ModelError, match=r"1 of another shape \(norm.weight \[6\], not \[5\]\)"):
        plan(before, replace(after, layouts=layouts))


def test_what_one_rank_does_not_give_is_told_on_all() -> None:
    before, after, stage = arrangement(SQUARE), arrangement(ROW), sharded.Stage(4)

    def act(world: World) -> dict[str, Tensor]:
        given = cut_for(before, world.rank, whole())
        if world.rank == 2:
            del given["up.weight.exp_avg"]
        return reshard(given, before, after, world=world)

    told = {str(result) for result in stage.play(act)}
    assert len(told) == 1
    assert "rank 2 does not give" in told.copy().pop()
    assert "1 missing (up.weight.exp_avg)" in told.pop()


def test_ranks_that_disagree_about_a_dtype_are_told() -> None:
    before, stage = arrangement(Degrees(data=2)), sharded.Stage(2)

    def act(world: World) -> dict[str, Tensor]:
        given = cut_for(before, world.rank, whole())
        given["norm.weight"] = given["norm.weight"].to(torch.float64 if world.rank else torch.float32)
        return reshard(given, before, before, world=world)

    assert all("'norm.weight' in two dtypes" in str(result) for result in stage.play(act))


def test_an_arrangement_of_another_world_is_refused() -> None:
    arranged = arrangement(SQUARE)
    with pytest.raises(ModelError, match="another world"):
        reshard(cut_for(arranged, 0, whole()), arranged, arranged)
    with pytest.raises(ModelError, match="ranks of one world"):
        plan(arranged, arrangement(Degrees(shard=2)))
    with pytest.raises(ConfigError, match="do not multiply"):
        Ranks.grid(SQUARE, members=(0, 1))


def test_a_piece_that_nobody_has_is_told() -> None:
    before, after = arrangement(SQUARE), arrangement(ROW)
    places = (*before.ranks.places[:3], None)
    with pytest.raises(ModelError, match="no rank has all of tensor"):
        plan(replace(before, ranks=Ranks(places)), after)


def dropped(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    return tuple(each for each in transfers if not each.name.endswith("exp_avg"))


def shifted(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """A part that is sent one row too short."""
    sent = [number for number, each in enumerate(transfers) if each.source != each.target]
    last = max(sent, key=lambda number: num_elements(transfers[number].region))
    region = transfers[last].region
    shorter = Region(
        global_shape=region.global_shape, offset=region.offset, shape=(region.shape[0] - 1, *region.shape[1:])
    )
    return (*transfers[:last], replace(transfers[last], region=shorter), *transfers[last + 1 :])


def full_of_sevens(size: int | tuple[int, ...], **given: Any) -> Tensor:
    return torch.full((size,) if isinstance(size, int) else tuple(size), 7, **given)


@pytest.mark.parametrize("fault", [dropped, shifted])
def test_a_planted_fault_of_the_plan_is_seen(fault: Any) -> None:
    real = plan
    poisoned = mock.patch.object(torch, "empty", full_of_sevens)
    with poisoned, mock.patch.object(module, "plan", lambda *both: fault(real(*both))), pytest.raises(AssertionError):
        assert_resharded(arrangement(SQUARE), arrangement(ROW), whole())


# The arithmetic underneath.


def box(offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...] = (4, 4)) -> Region:
    return Region(global_shape=whole, offset=offset, shape=shape)


@pytest.mark.parametrize(
    ("boxes", "is_tiled"),
    [
        ([((0, 0), (4, 4))], True),
        ([((0, 0), (4, 1)), ((0, 1), (2, 3)), ((2, 1), (2, 3))], True),
        ([((0, 0), (4, 2)), ((0, 2), (4, 1))], False),
        ([((0, 0), (4, 2)), ((0, 2), (4, 2)), ((0, 0), (4, 2))], False),
        ([((0, 0), (4, 3)), ((0, 2), (4, 2))], False),
        # As many elements as the whole, but one part twice and another not at all.
        ([((0, 0), (2, 4)), ((0, 0), (2, 4))], False),
        ([((0, 0), (4, 2)), ((1, 2), (4, 2))], False),
        ([((0, 0), (4, 4)), ((4, 0), (0, 4))], True),
        ([], False),
    ],
)
def test_boxes_tile_the_whole_or_not(boxes: list[tuple[tuple[int, int], tuple[int, int]]], is_tiled: bool) -> None:
    assert tile([box(*each) for each in boxes], Region.whole((4, 4))) == is_tiled


@settings(max_examples=200)
@given(
    boxes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(1, 2)),
        max_size=5,
    )
)
def test_tiling_is_what_counting_every_element_says(boxes: list[tuple[int, int, int, int, int]]) -> None:
    shape = (3, 3)
    count = np.zeros((6, 6), dtype=int)
    regions = []
    for rows, columns, top, left, times in boxes:
        for _ in range(times):
            regions.append(box((top, left), (rows, columns), shape))
            count[top : top + rows, left : left + columns] += 1
    inside = count[:3, :3]
    assert tile(regions, Region.whole(shape)) == bool((inside == 1).all() and count.sum() == inside.sum())


def test_a_scalar_is_one_element_and_is_there_once() -> None:
    whole = Region.whole(())
    assert overlap(whole, whole) == whole
    assert [tile([whole] * count, whole) for count in range(4)] == [False, True, False, False]


@given(shape=st.lists(st.integers(1, 6), max_size=3).map(tuple), num_most=st.integers(0, 40))
def test_a_box_is_cut_into_small_ones_that_make_it_up(shape: tuple[int, ...], num_most: int) -> None:
    whole = Region.whole(shape)
    parts = cut(whole, num_most)
    assert tile(parts, whole)
    assert all(num_elements(part) <= max(num_most, 1) for part in parts)


@settings(max_examples=60)
@given(arranged=arrangements())
def test_every_piece_has_one_owner(arranged: tuple[Arrangement, Arrangement, dict[str, Tensor]]) -> None:
    ranks, layouts = arranged[0].ranks, list(arranged[0].layouts.values())
    answers = [owned([(layout, 4) for layout in layouts], ranks, rank) for rank in range(ranks.size)]
    for number, layout in enumerate(layouts):
        owners = [rank for rank in range(ranks.size) if answers[rank][number]]
        regions = [ranks.region(layout, rank) for rank in owners]
        assert tile([region for region in regions if region is not None], Region.whole(layout.shape))


def test_owners_share_the_bytes_of_copies() -> None:
    ranks = Ranks.grid(Degrees(data=2, shard=2))
    tensors = [(Layout(shape=(size, 8)).cut("shard", 0, 2), 4) for size in range(2, 40)]
    loads = []
    for rank in range(4):
        mine = owned(tensors, ranks, rank)
        parts = [ranks.region(layout, rank) for (layout, _), own in zip(tensors, mine, strict=True) if own]
        loads.append(sum(num_elements(part) for part in parts if part is not None))
    assert max(loads) < 1.1 * min(loads)


def test_threads_that_play_ranks_meet() -> None:
    # The stage is a fake, so it is shown to carry what it is given.
    results = sharded.Stage(3).play(lambda world: world.agree((world.rank, threading.current_thread().name)))
    assert [[rank for rank, _ in answer] for answer in results] == [[0, 1, 2]] * 3
