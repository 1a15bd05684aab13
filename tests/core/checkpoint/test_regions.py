"""Arithmetic of regions, and which rank answers for which piece of a tensor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.core.checkpoint.regions import covers_exactly, num_elements, overlap
from kitforge.core.checkpoint.shard_ownership import assign_shards
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.types import Region

SQUARE = ParallelConfig(shard=2, tensor=2)


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
    assert covers_exactly([box(*each) for each in boxes], Region.full((4, 4))) == is_tiled


@pytest.mark.slow
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
    assert covers_exactly(regions, Region.full(shape)) == bool((inside == 1).all() and count.sum() == inside.sum())


def test_a_scalar_is_one_element_and_is_there_once() -> None:
    whole = Region.full(())
    assert overlap(whole, whole) == whole
    assert [covers_exactly([whole] * count, whole) for count in range(4)] == [False, True, False, False]


@st.composite
def spread_tensors(draw: st.DrawFn) -> tuple[Grid, list[Layout]]:
    """Layouts of tensors over up to four ranks, cut along either axis, both or none."""
    degrees = draw(
        st.sampled_from([ParallelConfig(shard=s, tensor=t) for s, t in [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1)]])
    )
    layouts = []
    for shape in draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=3)):
        made = Layout(shape=shape)
        for axis in draw(st.permutations(["shard", "tensor"])) if shape else ():
            if draw(st.booleans()):
                made = made.split(axis, draw(st.integers(0, len(shape) - 1)), getattr(degrees, axis))
        layouts.append(made)
    return Grid.of(degrees), layouts


@settings(max_examples=60)
@given(spread=spread_tensors())
def test_every_piece_has_one_owner(spread: tuple[Grid, list[Layout]]) -> None:
    ranks, layouts = spread
    answers = [assign_shards([(layout, 4) for layout in layouts], ranks, rank) for rank in range(ranks.size)]
    for number, layout in enumerate(layouts):
        owners = [rank for rank in range(ranks.size) if answers[rank][number]]
        regions = [ranks.region(layout, rank) for rank in owners]
        assert covers_exactly([region for region in regions if region is not None], Region.full(layout.shape))


def test_owners_share_the_bytes_of_copies() -> None:
    ranks = Grid.of(ParallelConfig(data=2, shard=2))
    tensors = [(Layout(shape=(size, 8)).split("shard", 0, 2), 4) for size in range(2, 40)]
    loads = []
    for rank in range(4):
        mine = assign_shards(tensors, ranks, rank)
        parts = [ranks.region(layout, rank) for (layout, _), own in zip(tensors, mine, strict=True) if own]
        loads.append(sum(num_elements(part) for part in parts if part is not None))
    assert max(loads) < 1.1 * min(loads)
