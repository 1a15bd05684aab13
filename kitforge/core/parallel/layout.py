"""The regions of shards of a tensor, as plain arithmetic that every rank can compute for every other.

A dim of n split k ways has shards of ceil(n / k); the last ones may be shorter or empty, as with `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A dim of a tensor, sharded along a mesh axis of that degree."""

    axis: str
    dim: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sharding of a tensor of a global shape: splits in order, later ones within the shards of earlier ones. All
    are along axes of one view of the grid of ranks."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    # The indices along `pipeline` at which the tensor lives; None: at all. A tied tensor lives on several stages.
    stages: tuple[int, ...] | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which the tensor is split."""
        return frozenset(split.axis for split in self.splits)

    def region(self, index: Mapping[str, int]) -> Region | None:
        """The region of the rank with these indices along the axes; None where the tensor is on other stages."""
        if self.stages is not None and index["pipeline"] not in self.stages:
            return None
        offset, shape = [0] * len(self.shape), list(self.shape)
        for split in self.splits:
            size = shape[split.dim]
            chunk = -(-size // split.degree)
            start = min(index[split.axis] * chunk, size)
            offset[split.dim] += start
            shape[split.dim] = min(chunk, size - start)
        return Region(global_shape=self.shape, offset=tuple(offset), shape=tuple(shape))

    def held_region(self, index: Mapping[str, int]) -> Region:
        """`region` of a rank that holds a part of the tensor."""
        region = self.region(index)
        assert region is not None, f"a tensor of stages {self.stages} is not at {dict(index)}"
        return region

    def split(self, axis: str, dim: int, degree: int) -> Layout:
        """The layout with one more split; unchanged for degree 1."""
        if degree == 1:
            return self
        return replace(self, splits=(*self.splits, Split(axis=axis, dim=dim, degree=degree)))
