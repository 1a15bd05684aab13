"""Layouts: the arithmetic of pieces."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kitforge.core.parallel.layout import Layout

AXES = ("data", "shard", "tensor")


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(2, 5)), max_size=3),
)
def test_pieces_are_those_of_chunks_within_chunks(shape: list[int], cuts: list[tuple[int, int]]) -> None:
    layout = Layout(shape=tuple(shape))
    for axis, (dim, degree) in zip(AXES, cuts, strict=False):
        layout = layout.split(axis, min(dim, len(shape) - 1), degree)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = torch.zeros_like(whole)
    degrees = [split.degree for split in layout.splits]
    for place in range(math.prod(degrees)):
        index = {}
        for split, degree in zip(layout.splits, degrees, strict=True):
            place, index[split.axis] = divmod(place, degree)
        expected = whole
        for split in layout.splits:
            size = expected.shape[split.dim]
            chunk = -(-size // split.degree)
            start = min(index[split.axis] * chunk, size)
            expected = expected.narrow(split.dim, start, min(chunk, size - start))
        region = layout.held_region(index)
        assert torch.equal(region.of(whole), expected)
        region.of(seen).add_(1)
    assert bool((seen == 1).all())


def test_a_degree_of_one_cuts_nothing() -> None:
    layout = Layout(shape=(4, 4))
    assert layout.split("tensor", 0, 1) is layout


def test_an_uneven_dim_leaves_the_last_ranks_with_less_or_nothing() -> None:
    layout = Layout(shape=(5,)).split("shard", 0, 4)
    assert [layout.held_region({"shard": rank}).shape for rank in range(4)] == [(2,), (2,), (1,), (0,)]
