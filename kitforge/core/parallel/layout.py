"""Where each rank's piece of a tensor lies, as plain arithmetic that any rank can do for any other.

A dim of n that is split k ways has pieces of ceil(n / k); the last ones may be shorter or empty, as with `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A dim of a tensor that is split along a mesh axis of that degree."""

    axis: str
    dim: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor of a global shape is cut: by each split in turn, the later ones within the pieces of the earlier."""

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @property
    def num_shards(self) -> int:
        """Distinct pieces; every rank beyond holds a copy of one of them."""
        count = 1
        for split in self.splits:
            count *= split.degree
        return count

    def region(self, index: Mapping[str, int]) -> Region:
        """The piece of the rank that has these indices along the axes."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for split in self.splits:
            size = shape[split.dim]
            chunk = -(-size // split.degree)
            start = min(index[split.axis] * chunk, size)
            offset[split.dim] += start
            shape[split.dim] = min(chunk, size - start)
        return Region(global_shape=self.shape, offset=tuple(offset), shape=tuple(shape))

    def split(self, axis: str, dim: int, degree: int) -> Layout:
        """The layout after one more split; the same when the degree is 1."""
        if degree == 1:
            return self
        return Layout(shape=self.shape, splits=(*self.splits, Split(axis=axis, dim=dim, degree=degree)))
