"""Shards of tensors over ranks, and the owner that writes each of them. Every rank computes the same without
communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from kitforge.core.checkpoint.regions import num_elements
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a tensor, and the ranks that have it, in ascending order."""

    region: Region
    holders: tuple[int, ...]


@final
class RankCoords:
    """The mesh coordinates of all ranks; None for a rank that takes no part."""

    def __init__(self, coordinates: Sequence[Mapping[str, int] | None]) -> None:
        self.coordinates = tuple(coordinates)
        self._regions: dict[Layout, tuple[Region | None, ...]] = {}
        self._shards: dict[Layout, tuple[Shard, ...]] = {}

    @classmethod
    def of(cls, mesh: Mesh) -> RankCoords:
        """The ranks of a mesh."""
        return cls([mesh.index_of(rank) for rank in range(mesh.size)])

    @property
    def size(self) -> int:
        """Ranks of the world, those that take no part included."""
        return len(self.coordinates)

    def region(self, layout: Layout, rank: int) -> Region | None:
        """What that rank has of a tensor of that layout; None where it takes no part."""
        return self._all_regions(layout)[rank]

    def shards(self, layout: Layout) -> tuple[Shard, ...]:
        """The distinct pieces that have elements; of a tensor without elements, the first piece."""
        if layout not in self._shards:
            holders: dict[Region, list[int]] = {}
            for rank, region in enumerate(self._all_regions(layout)):
                if region is not None:
                    holders.setdefault(region, []).append(rank)
            found = [Shard(region=region, holders=tuple(ranks)) for region, ranks in holders.items()]
            self._shards[layout] = tuple(shard for shard in found if num_elements(shard.region)) or tuple(found[:1])
        return self._shards[layout]

    def _all_regions(self, layout: Layout) -> tuple[Region | None, ...]:
        if layout not in self._regions:
            self._regions[layout] = tuple(None if own is None else layout.region(own) for own in self.coordinates)
        return self._regions[layout]


def assign_shards(tensors: Iterable[tuple[Layout, int]], ranks: RankCoords, rank: int) -> list[bool]:
    """For each tensor, given by its layout and element size, whether that rank owns its shard.

    Every shard has one owner among its ranks: the one with the fewest bytes so far.
    """
    loads = [0] * ranks.size
    answers = []
    for layout, element_bytes in tensors:
        is_owned = False
        for shard in ranks.shards(layout):
            owner = min(shard.holders, key=loads.__getitem__)
            loads[owner] += num_elements(shard.region) * element_bytes
            is_owned |= owner == rank
        answers.append(is_owned)
    return answers
