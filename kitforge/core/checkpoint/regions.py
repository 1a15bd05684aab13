"""Regions of tensors: their overlap, whether several tile a tensor, and stored slices joined to whole tensors."""

import itertools
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from kitforge.core.checkpoint.manifest import Slice, TensorEntry
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.types import Region


def num_elements(box: Region) -> int:
    """Number of elements of a region; 1 for a 0-dim tensor."""
    return math.prod(box.shape)


def overlap(first: Region, second: Region) -> Region | None:
    """The intersection of two regions, or None."""
    starts = tuple(map(max, first.offset, second.offset))
    shape = tuple(end - start for start, end in zip(starts, map(min, _ends(first), _ends(second)), strict=True))
    if any(length <= 0 for length in shape):
        return None
    return Region(global_shape=first.global_shape, offset=starts, shape=shape)


def within(part: Region, box: Region) -> Region:
    """A part of the box, relative to the start of the box."""
    offset = tuple(start - before for start, before in zip(part.offset, box.offset, strict=True))
    return Region(global_shape=box.shape, offset=offset, shape=part.shape)


def covers_exactly(boxes: Iterable[Region], whole: Region) -> bool:
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


def region_of(entry: Slice) -> Region:
    """The region of a slice."""
    return Region(global_shape=entry.global_shape, offset=entry.offset, shape=entry.shape)


def by_name(entries: Iterable[Slice]) -> dict[str, list[Slice]]:
    """The slices of every tensor, in the order in which the tensors were saved."""
    slices: dict[str, list[Slice]] = {}
    for entry in entries:
        slices.setdefault(entry.name, []).append(entry)
    return slices


def entry_of(folder: Path, slices: Sequence[Slice]) -> TensorEntry:
    """The tensor that the slices make up. Raises CheckpointError unless they agree with one another, leave no hole and
    no overlap, and lie in a grid."""
    first = slices[0]
    dims = range(len(first.global_shape))
    files = {entry.offset: entry.file for entry in slices}
    alike = {(entry.dtype, entry.global_shape, entry.alias_of, len(entry.offset), len(entry.shape)) for entry in slices}
    if len(alike) > 1 or len(first.offset) != len(dims):
        raise _why_not(folder, slices)
    starts = tuple(tuple(sorted({entry.offset[dim] for entry in slices})) for dim in dims)
    if len(files) < len(slices) or not files.keys() >= set(itertools.product(*starts)):
        raise _why_not(folder, slices)
    try:
        found = TensorEntry(
            name=first.name,
            dtype=first.dtype,
            shape=first.global_shape,
            starts=starts,
            files=tuple(files[offset] for offset in itertools.product(*starts)),
            alias_of=first.alias_of,
        )
    except CheckpointError:
        raise _why_not(folder, slices) from None
    for dim in dims:
        ends = dict(zip(starts[dim], (*starts[dim][1:], first.global_shape[dim]), strict=True))
        if any(entry.offset[dim] + entry.shape[dim] != ends[entry.offset[dim]] for entry in slices):
            raise _why_not(folder, slices)
    return found


def _why_not(folder: Path, slices: Sequence[Slice]) -> CheckpointError:
    """The error text for slices that do not form a grid of the tensor."""
    first = slices[0]
    for entry in slices:
        got = (entry.dtype, entry.global_shape, entry.alias_of)
        expected = (first.dtype, first.global_shape, first.alias_of)
        dims = {len(entry.global_shape), len(entry.offset), len(entry.shape)}
        if got != expected or len(dims) > 1:
            return _wrong(folder, entry.name, f"slices that differ in {first.file} and {entry.file}", slices)
    boxes = [(entry, region_of(entry)) for entry in slices]
    if covers_exactly([box for _, box in boxes], Region.full(first.global_shape)):
        return _wrong(folder, first.name, "slices that lie in no grid", slices)
    twice = next((pair for pair in combinations(boxes, 2) if overlap(pair[0][1], pair[1][1])), None)
    if twice is not None:
        return _wrong(folder, first.name, f"elements that are in {twice[0][0].file} and in {twice[1][0].file}", slices)
    return _wrong(folder, first.name, "only a part of it", slices)


def _wrong(folder: Path, name: str, got: str, slices: Sequence[Slice]) -> CheckpointError:
    listed = ", ".join(f"{list(entry.shape)} at {list(entry.offset)} in {entry.file}" for entry in slices[:8])
    return CheckpointError(
        f"the slices of tensor {name!r} in {folder} do not make up the tensor",
        got=f"{got}: {listed}{', ...' if len(slices) > 8 else ''}",
        expected=f"every element of {list(slices[0].global_shape)} once",
    )


def _ends(box: Region) -> Iterable[int]:
    return map(int.__add__, box.offset, box.shape)
