"""Boxes within a tensor: what two of them share, and whether many of them make up the whole. Plain arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from kitforge.foundation.types import Region


def num_elements(box: Region) -> int:
    """Elements of the box; 1 for that of a 0-dim tensor."""
    return math.prod(box.shape)


def overlap(first: Region, second: Region) -> Region | None:
    """The elements of one global tensor that lie in both boxes, or None when there are none."""
    starts = tuple(map(max, first.offset, second.offset))
    shape = tuple(end - start for start, end in zip(starts, map(min, _ends(first), _ends(second)), strict=True))
    if any(length <= 0 for length in shape):
        return None
    return Region(global_shape=first.global_shape, offset=starts, shape=shape)


def within(part: Region, box: Region) -> Region:
    """A part of the box as it lies in the tensor that holds the box and nothing else."""
    offset = tuple(start - before for start, before in zip(part.offset, box.offset, strict=True))
    return Region(global_shape=box.shape, offset=offset, shape=part.shape)


def tile(boxes: Iterable[Region], whole: Region) -> bool:
    """Whether the boxes cover every element of the whole exactly once, and nothing else.

    How often an element is covered is odd inside and even outside of the whole if and only if the corners of all boxes
    and of the whole cancel in pairs. With as many elements in the boxes as in the whole, odd can only be one. So one
    pass over the boxes is enough, where comparing them with each other would take a pass for each.
    """
    unpaired: set[tuple[int, ...]] = set()
    excess = -2 * num_elements(whole)
    for box in (whole, *boxes):
        excess += num_elements(box)
        for corner in itertools.product(*zip(box.offset, _ends(box), strict=True)):
            unpaired ^= {corner}
    return not unpaired and excess == 0


def cut(box: Region, num_most: int) -> list[Region]:
    """The box in pieces of at most so many elements (at least one), cut along its first dims."""
    if num_elements(box) <= max(num_most, 1):
        return [box]
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    rows = max(1, num_most * box.shape[dim] // num_elements(box))
    pieces = []
    for start in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(rows, box.shape[dim] - start)
        pieces += cut(Region(global_shape=box.global_shape, offset=tuple(offset), shape=tuple(shape)), num_most)
    return pieces


def _ends(box: Region) -> Iterable[int]:
    return map(int.__add__, box.offset, box.shape)
