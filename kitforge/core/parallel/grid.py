"""The grid of ranks: its axes, its views, and the ranks that hold a part of a tensor.

Plain arithmetic, which every rank computes alike and without communication.

The ranks are one grid of the axes of `AXES`. Every view is another shape of the same grid, made by `reshape` alone, so
that an axis of a view is some neighbouring axes of the grid together, or a factor of them:

    pipeline  data  shard  context          tensor      the dense view
    pipeline  data  [ fsdp       ]          tensor      shards of the state: shard x context
    pipeline  [replicas ]  context          tensor      different samples: data x shard
    pipeline  [ batch            ]          tensor      different tokens: data x shard x context
    pipeline  expert_data  expert           tensor      experts: the ranks of `batch`, divided another way
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.types import Region

# The first view that has all axes of a layout is that of the tensor.
VIEWS = (
    AXES,
    ("pipeline", "data", "fsdp", "tensor"),
    ("pipeline", "replicas", "context", "tensor"),
    ("pipeline", "batch", "tensor"),
    ("pipeline", "expert_data", "expert", "tensor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a tensor, and the ranks that have it, in ascending order."""

    region: Region
    holders: tuple[int, ...]


class Grid:
    """The coordinates of all ranks along the axes of all views."""

    def __init__(self, degrees: Mapping[str, int]) -> None:
        """`degrees` are those of `AXES`, and `expert`, which divides data x shard x context; by default 1."""
        data, shard, context, expert = (degrees.get(axis, 1) for axis in ("data", "shard", "context", "expert"))
        batch = data * shard * context
        assert batch % expert == 0, f"{expert} expert ranks of {batch}"
        derived = {"fsdp": shard * context, "replicas": data * shard, "batch": batch}
        experts = {"expert_data": batch // expert, "expert": expert}
        self.degrees = {axis: degrees.get(axis, 1) for axis in AXES} | derived | experts
        self.size = math.prod(self.degrees[axis] for axis in AXES)
        self._regions: dict[Layout, tuple[Region | None, ...]] = {}
        self._shards: dict[Layout, tuple[Shard, ...]] = {}
        self._num_holders: dict[tuple[Layout, int], int] = {}

    @classmethod
    def of(cls, degrees: ParallelConfig) -> Grid:
        """The grid of a configuration."""
        return cls({axis: getattr(degrees, axis) for axis in (*AXES, "expert")})

    def index_of(self, rank: int) -> Mapping[str, int]:
        """The coordinates of a rank along every axis of every view."""
        index: dict[str, int] = {}
        for view in VIEWS:
            coords = np.unravel_index(rank, [self.degrees[axis] for axis in view])
            index |= {axis: int(coord) for axis, coord in zip(view, coords, strict=True)}
        return index

    @cached_property
    def coordinates(self) -> tuple[Mapping[str, int], ...]:
        """`index_of` every rank."""
        return tuple(map(self.index_of, range(self.size)))

    def groups(self, axis: str) -> list[list[int]]:
        """The groups along an axis: ranks that differ in it alone, by their coordinate along it."""
        view = next(view for view in VIEWS if axis in view)
        grid = np.arange(self.size).reshape([self.degrees[each] for each in view])
        rows: list[list[int]] = np.moveaxis(grid, view.index(axis), -1).reshape(-1, self.degrees[axis]).tolist()
        return rows

    def copied_axes(self, layout: Layout) -> tuple[str, ...]:
        """The axes with several ranks, of the view of a tensor, along which ranks hold the same part of it."""
        view = next(view for view in VIEWS if layout.axes <= set(view))
        stages = layout.stages is None or len(layout.stages) > 1
        return tuple(
            axis
            for axis in view
            if self.degrees[axis] > 1 and axis not in layout.axes and (axis != "pipeline" or stages)
        )

    def sum_axis(self, layout: Layout) -> str:
        """The axis over which the gradient of a tensor is summed: all ranks with different tokens; for an expert, to
        which its ranks have sent all tokens of their group, those that hold it as well."""
        return "expert_data" if "expert" in layout.axes else "batch"

    def region(self, layout: Layout, rank: int) -> Region | None:
        """The part of a tensor that a rank has; None where it has none."""
        return self._all_regions(layout)[rank]

    def num_holders(self, layout: Layout, rank: int) -> int:
        """The ranks that have the same part of a tensor as that rank, which has one."""
        key = (layout, rank)
        if key not in self._num_holders:
            regions = self._all_regions(layout)
            self._num_holders[key] = regions.count(regions[rank])
        return self._num_holders[key]

    def shards(self, layout: Layout) -> tuple[Shard, ...]:
        """The distinct parts that have elements; of a tensor without elements, the first part."""
        if layout not in self._shards:
            holders: dict[Region, list[int]] = {}
            for rank, region in enumerate(self._all_regions(layout)):
                if region is not None:
                    holders.setdefault(region, []).append(rank)
            found = [Shard(region=region, holders=tuple(ranks)) for region, ranks in holders.items()]
            filled = tuple(shard for shard in found if math.prod(shard.region.shape))
            self._shards[layout] = filled or tuple(found[:1])
        return self._shards[layout]

    def _all_regions(self, layout: Layout) -> tuple[Region | None, ...]:
        if layout not in self._regions:
            self._regions[layout] = tuple(map(layout.region, self.coordinates))
        return self._regions[layout]
