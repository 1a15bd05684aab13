"""Where the pieces of tensors lie in a world of ranks, and which rank answers for which. Arithmetic without messages:
every rank computes the same for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from kitforge.core.checkpoint.regions import num_elements
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor, and the ranks that have it, in ascending order."""

    region: Region
    holders: tuple[int, ...]


@final
class Ranks:
    """The places of all ranks of a world: for each its index along every axis, or None where it takes no part."""

    def __init__(self, places: Sequence[Mapping[str, int] | None]) -> None:
        self.places = tuple(places)
        self._regions: dict[Layout, tuple[Region | None, ...]] = {}
        self._pieces: dict[Layout, tuple[Piece, ...]] = {}

    @classmethod
    def of(cls, mesh: Mesh) -> Ranks:
        """The ranks of a mesh."""
        return cls([mesh.index_of(rank) for rank in range(mesh.size)])

    @property
    def size(self) -> int:
        """Ranks of the world, those that take no part included."""
        return len(self.places)

    def region(self, layout: Layout, rank: int) -> Region | None:
        """What that rank has of a tensor of that layout; None where it takes no part."""
        return self._all_regions(layout)[rank]

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """The distinct pieces that have elements; of a tensor without elements, the first piece."""
        if layout not in self._pieces:
            holders: dict[Region, list[int]] = {}
            for rank, region in enumerate(self._all_regions(layout)):
                if region is not None:
                    holders.setdefault(region, []).append(rank)
            found = [Piece(region=region, holders=tuple(ranks)) for region, ranks in holders.items()]
            self._pieces[layout] = tuple(piece for piece in found if num_elements(piece.region)) or tuple(found[:1])
        return self._pieces[layout]

    def _all_regions(self, layout: Layout) -> tuple[Region | None, ...]:
        if layout not in self._regions:
            self._regions[layout] = tuple(None if place is None else layout.region(place) for place in self.places)
        return self._regions[layout]


def owned(tensors: Iterable[tuple[Layout, int]], ranks: Ranks, rank: int) -> list[bool]:
    """For each tensor, given as its layout and the bytes of an element, whether that rank answers for its piece.

    Every piece has one owner among those that have it: the one that answers for the fewest bytes so far.
    """
    loads = [0] * ranks.size
    answers = []
    for layout, element_bytes in tensors:
        is_owned = False
        for piece in ranks.pieces(layout):
            owner = min(piece.holders, key=loads.__getitem__)
            loads[owner] += num_elements(piece.region) * element_bytes
            is_owned |= owner == rank
        answers.append(is_owned)
    return answers
