"""The regions of shards of a tensor, as plain arithmetic that every rank can compute for every other.

A dim of n split k ways has shards of ceil(n / k); the last ones may be shorter or empty, as with `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A dim of a tensor, sharded along a mesh axis of that degree."""

    axis: str
    dim: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sharding of a tensor of a global shape: splits in order, later ones within the shards of earlier ones."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @property
    def num_shards(self) -> int:
        """Number of distinct shards; further ranks hold replicas."""
        count = 1
        for split in self.splits:
            count *= split.degree
        return count

    def region(self, index: Mapping[str, int]) -> Region:
        """The region of the rank with these indices along the axes."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for split in self.splits:
            size = shape[split.dim]
            chunk = -(-size // split.degree)
            start = min(index[split.axis] * chunk, size)
            offset[split.dim] += start
            shape[split.dim] = min(chunk, size - start)
        return Region(global_shape=self.shape, offset=tuple(offset), shape=tuple(shape))

    def split(self, axis: str, dim: int, degree: int) -> Layout:
        """The layout with one more split; unchanged for degree 1."""
        if degree == 1:
            return self
        return Layout(shape=self.shape, splits=(*self.splits, Split(axis=axis, dim=dim, degree=degree)))
