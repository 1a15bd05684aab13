"""The grid of ranks, proven without ranks: who holds which part of a tensor, in meshes of up to 64 ranks."""

import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.checkpoint.regions import covers_exactly
from kitforge.core.checkpoint.shard_ownership import assign_shards
from kitforge.core.checkpoint.snapshot import Snapshot
from kitforge.core.optim.grad_norm import global_norm
from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.grid import VIEWS, Grid
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.types import Region
from tests.patience import PATIENCE

MAX_RANKS = 64


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Meshes of up to 64 ranks; experts divide the ranks that share a batch in any way."""
    degrees, room = {}, MAX_RANKS
    for axis in draw(st.permutations(AXES)):
        degrees[axis] = draw(st.integers(1, min(4, room)))
        room //= degrees[axis]
    batch = degrees["data"] * degrees["shard"] * degrees["context"]
    degrees["expert"] = draw(st.sampled_from([each for each in range(1, batch + 1) if batch % each == 0]))
    return Grid(degrees)


@st.composite
def layouts(draw: st.DrawFn, grid: Grid) -> Layout:
    """Of dense tensors, of experts, of buffers that are whole; on all stages, on one, or tied on several."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    stages = range(grid.degrees["pipeline"])
    held = draw(
        st.none() | st.lists(st.sampled_from(stages), min_size=1, unique=True).map(lambda own: tuple(sorted(own)))
    )
    found = Layout(shape=shape, stages=held)
    for axis in draw(st.sampled_from([("tensor", "fsdp"), ("expert", "tensor", "expert_data"), ("tensor",), ()])):
        if draw(st.booleans()):
            found = found.split(axis, draw(st.integers(0, len(shape) - 1)), grid.degrees[axis])
    return found


@st.composite
def spread(draw: st.DrawFn) -> tuple[Grid, list[Layout]]:
    grid = draw(grids())
    return grid, draw(st.lists(layouts(grid), min_size=1, max_size=4))


@settings(max_examples=100)
@given(grid=grids())
def test_every_view_is_a_reshape_of_the_one_grid(grid: Grid) -> None:
    for view in VIEWS:
        assert math.prod(grid.degrees[axis] for axis in view) == grid.size
        places = [tuple(index[axis] for axis in view) for index in grid.coordinates]
        assert places == list(itertools.product(*(range(grid.degrees[axis]) for axis in view)))
        for axis in view:
            groups = grid.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
            for group in groups:
                indices = [grid.coordinates[rank] for rank in group]
                assert [index[axis] for index in indices] == list(range(grid.degrees[axis]))
                assert len({tuple(index[each] for each in view if each != axis) for index in indices}) == 1


def test_the_views_of_the_example_with_sixteen_ranks() -> None:
    grid = Grid({"pipeline": 2, "shard": 2, "context": 2, "tensor": 2, "expert": 4})
    assert (
        grid.coordinates[6]["fsdp"] == 3 and grid.coordinates[6]["shard"] == 1 and grid.coordinates[6]["context"] == 1
    )
    assert grid.groups("fsdp")[0] == [0, 2, 4, 6] == grid.groups("expert")[0]
    dense = Layout(shape=(8, 8), stages=(1,)).split("tensor", 0, 2).split("fsdp", 0, 4)
    tied = Layout(shape=(8, 8), stages=(0, 1)).split("tensor", 0, 2).split("fsdp", 0, 4)
    experts = Layout(shape=(4, 8, 8), stages=(1,)).split("expert", 0, 4).split("tensor", 1, 2)
    bias = Layout(shape=(4,), stages=(1,))
    assert [grid.num_holders(each, 15) for each in (dense, tied, experts, bias)] == [1, 2, 1, 8]
    assert grid.copied_axes(tied) == ("pipeline",) and grid.copied_axes(experts) == ()


@settings(max_examples=150)
@given(spread=spread())
def test_every_element_is_held_as_often_as_its_layout_says_counted_once_and_saved_once(
    spread: tuple[Grid, list[Layout]],
) -> None:
    grid, tensors = spread
    owned = [assign_shards([(layout, 4) for layout in tensors], grid, rank) for rank in range(grid.size)]
    for number, layout in enumerate(tensors):
        held, counted, saved = (np.zeros(layout.shape) for _ in range(3))
        for rank in range(grid.size):
            region = grid.region(layout, rank)
            is_here = layout.stages is None or grid.coordinates[rank]["pipeline"] in layout.stages
            assert (region is not None) == is_here
            if region is None:
                assert not owned[rank][number]
                continue
            part = tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
            held[part] += 1
            counted[part] += 1 / grid.num_holders(layout, rank)
            saved[part] += owned[rank][number]
        stages = grid.degrees["pipeline"] if layout.stages is None else len(layout.stages)
        ranks = grid.size // grid.degrees["pipeline"] * stages
        assert (held == ranks / math.prod(split.degree for split in layout.splits)).all()
        assert np.allclose(counted, 1, rtol=0, atol=1e-12)
        assert (saved == 1).all()


@settings(max_examples=100)
@given(spread=spread())
def test_the_copied_axes_lead_from_a_holder_to_all_others(spread: tuple[Grid, list[Layout]]) -> None:
    grid, tensors = spread
    for layout in tensors:
        for shard in grid.shards(layout):
            if not math.prod(shard.region.shape):
                continue
            reached = {shard.holders[0]}
            for axis in grid.copied_axes(layout):
                reached |= {rank for group in grid.groups(axis) if reached & set(group) for rank in group}
            assert {rank for rank in reached if grid.region(layout, rank) is not None} == set(shard.holders)


@settings(max_examples=50)
@given(spread=spread(), seed=st.integers(0, 9))
def test_the_norm_of_all_parts_is_that_of_the_whole_tensors(spread: tuple[Grid, list[Layout]], seed: int) -> None:
    grid, tensors = spread
    generator = torch.Generator().manual_seed(seed)
    wholes = [torch.randn(layout.shape, generator=generator, dtype=torch.float64) for layout in tensors]
    squares = torch.zeros((), dtype=torch.float64)
    for rank, (layout, whole) in itertools.product(range(grid.size), zip(tensors, wholes, strict=True)):
        region = grid.region(layout, rank)
        if region is not None:
            squares += region.of(whole).square().sum() / grid.num_holders(layout, rank)
    assert torch.allclose(squares.sqrt(), global_norm(wholes).double(), rtol=1e-12)


def play(size: int, act: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """What `act(rank, all_gather)` returns on ranks that are threads."""
    barrier, table, results = threading.Barrier(size, timeout=PATIENCE), [None] * size, [None] * size

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            table[rank] = value
            barrier.wait()
            answers = list(table)
            barrier.wait()
            return answers

        results[rank] = act(rank, gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def held_tensors(wholes: Mapping[str, Tensor], known: Mapping[str, Layout], grid: Grid, rank: int) -> dict[str, Tensor]:
    regions = {name: grid.region(known[name], rank) for name in wholes}
    return {name: region.of(wholes[name]).clone() for name, region in regions.items() if region is not None}


def test_ranks_of_several_stages_snapshot_the_union_of_their_tensors() -> None:
    grid = Grid({"pipeline": 2, "shard": 2, "tensor": 2})
    known = {
        "embedding": Layout(shape=(6, 4), stages=(0, 1)).split("tensor", 0, 2).split("fsdp", 0, 2),
        "blocks.0": Layout(shape=(5, 4), stages=(0,)).split("tensor", 1, 2).split("fsdp", 0, 2),
        "blocks.1": Layout(shape=(5, 4), stages=(1,)).split("fsdp", 0, 2),
        "blocks.1.bias": Layout(shape=(3,), stages=(1,)),
    }
    wholes = {name: torch.randn(layout.shape) for name, layout in known.items()}

    def act(rank: int, gather: Callable[[Any], list[Any]]) -> Snapshot:
        snapshot = Snapshot(grid, rank, gather)
        own = held_tensors(wholes, known, grid, rank)
        moments = {f"{name}.exp_avg": each * 2 for name, each in own.items()}
        layouts = known | {f"{name}.exp_avg": layout for name, layout in known.items()}
        snapshot.take(1, model=own.items(), optimizer=moments.items(), state={}, layouts=layouts)
        return snapshot

    ranks: list[Snapshot] = play(grid.size, act)
    assert len({str((each.names, each.aliases, each.wholes)) for each in ranks}) == 1
    assert set(ranks[0].names["model"]) == set(known)
    for name, layout in known.items():
        for saved in (name, f"{name}.exp_avg"):
            owners = [each for each in ranks if saved in each.buffers]
            parts = [each.region(saved) for each in owners if math.prod(each.buffers[saved].shape)]
            assert covers_exactly(parts, Region.full(layout.shape))
            assert all(
                torch.equal(own.buffers[name], own.region(name).of(wholes[name])) for own in owners if saved == name
            )


def test_a_grid_is_that_of_its_configuration() -> None:
    grid = Grid.of(ParallelConfig(data=2, shard=3, tensor=2))
    assert grid.size == 12 and (grid.degrees["fsdp"], grid.degrees["replicas"], grid.degrees["batch"]) == (3, 6, 6)
