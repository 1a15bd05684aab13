"""The stored slices of a checkpoint's tensors: gathered by name, and checked to make up each tensor exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

from kitforge.core.checkpoint.boxes import overlap, tile
from kitforge.core.checkpoint.layout import TensorEntry
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.types import Region


def region_of(entry: TensorEntry) -> Region:
    """Where a slice lies in its tensor."""
    return Region(global_shape=entry.global_shape, offset=entry.offset, shape=entry.shape)


def by_name(entries: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    """The slices of every tensor, in the order in which the tensors were saved."""
    slices: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        slices.setdefault(entry.name, []).append(entry)
    return slices


def check_slices(folder: Path, slices: Sequence[TensorEntry]) -> None:
    """Raise CheckpointError unless the slices of a tensor agree with one another and leave no hole and no overlap."""
    first = slices[0]
    # By far the most tensors of most checkpoints are one slice, and the whole.
    if len(slices) == 1 and first.shape == first.global_shape and not any(first.offset):
        return
    for entry in slices:
        got = (entry.dtype, entry.global_shape, entry.alias_of)
        expected = (first.dtype, first.global_shape, first.alias_of)
        dims = {len(entry.global_shape), len(entry.offset), len(entry.shape)}
        if got != expected or len(dims) > 1:
            raise _wrong(folder, entry.name, f"slices that differ in {first.file} and {entry.file}", slices)
    boxes = [(entry, region_of(entry)) for entry in slices]
    if tile([box for _, box in boxes], Region.whole(first.global_shape)):
        return
    twice = next((pair for pair in combinations(boxes, 2) if overlap(pair[0][1], pair[1][1])), None)
    if twice is not None:
        raise _wrong(folder, first.name, f"elements that are in {twice[0][0].file} and in {twice[1][0].file}", slices)
    raise _wrong(folder, first.name, "only a part of it", slices)


def _wrong(folder: Path, name: str, got: str, slices: Sequence[TensorEntry]) -> CheckpointError:
    listed = ", ".join(f"{list(entry.shape)} at {list(entry.offset)} in {entry.file}" for entry in slices[:8])
    return CheckpointError(
        f"the slices of tensor {name!r} in {folder} do not make up the tensor",
        got=f"{got}: {listed}{', ...' if len(slices) > 8 else ''}",
        expected=f"every element of {list(slices[0].global_shape)} once",
    )
