"""The device mesh: the coordinates of a rank and its process groups."""

import datetime
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kitforge.core.parallel import collectives
from kitforge.core.parallel.column import Column
from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.grid import Grid


class Mesh:
    """The ranks as a grid of parallel axes, seen in several views; an axis of degree 1 has no process group.

    Groups: `group(axis)` of one axis of a view, `replicas` of all ranks with different samples (sums over the batch),
    `world` of all ranks (gradient norm, table rows).
    """

    def __init__(self, degrees: ParallelConfig, device_type: str, num_inference_ranks: int = 0) -> None:
        """`num_inference_ranks` further ranks are not on the grid; they take part in its creation only."""
        degrees.check_world(dist.get_world_size() - num_inference_ranks)
        self.degrees = degrees
        self.grid = Grid.of(degrees)
        self.size = self.grid.size
        self.rank = dist.get_rank()
        self.shape = {axis: self.degree(axis) for axis in AXES if self.degree(axis) > 1}
        grid = torch.arange(self.size).view(tuple(self.shape.values()))
        self.device_mesh = DeviceMesh(device_type, grid, mesh_dim_names=tuple(self.shape))
        self._is_dry = dist.get_backend() == "fake"
        # Of a plan every axis has a group of its own, which names it.
        is_apart = num_inference_ranks or self._is_dry
        world = dist.new_group(list(range(self.size))) if is_apart else dist.group.WORLD
        assert world is not None  # exists once torch.distributed is initialized
        self.world: dist.ProcessGroup = world
        self._groups = self._make_groups()
        columns, group = self.grid.groups("pipeline"), self.group("pipeline")
        self._column = None
        if self.degree("pipeline") > 1:
            self._column = Column(columns, self.rank, group, device_type, degrees.timeout, degrees.stages)

    def degree(self, axis: str) -> int:
        """Ranks along the axis of a view."""
        return self.grid.degrees[axis]

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The coordinates of this rank by axis."""
        return self.grid.index_of(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along the axis; None for degree 1, and for a rank that is not on the grid."""
        return self._groups.get(axis)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group of all ranks that have different samples."""
        return self.group("replicas")

    @property
    def column(self) -> Column:
        """The stages of this rank's pipeline, of which there are several."""
        assert self._column is not None
        return self._column

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A new CPU group of all ranks for a background thread, separate from the collectives of training.

        All ranks of the grid create it at the same point of the program.
        """
        group: dist.ProcessGroup = dist.new_group(
            list(range(self.size)),
            backend="fake" if self._is_dry else "gloo",
            timeout=datetime.timedelta(seconds=self.degrees.timeout),
            use_local_synchronization=self.size < dist.get_world_size(),
        )
        return group

    def sub_mesh(self, *axes: str) -> DeviceMesh:
        """The torch DeviceMesh of neighbouring axes of a view, of those with a degree above 1; there must be one."""
        names = tuple(axis for axis in axes if self.degree(axis) > 1)
        if set(names) <= set(self.shape):
            return self.device_mesh[names]
        # The ranks that differ in these axes alone, which the reshape has made neighbours: from outer to inner.
        rows = [next(row for row in self.grid.groups(names[-1]) if self.rank in row)]
        if len(names) > 1:
            outer = self.grid.groups(names[0])
            rows = [next(row for row in outer if each in row) for each in rows[0]]
            rows = np.transpose(rows).tolist()
        groups: list[Any] = [self.group(axis) for axis in names]
        device_type = self.device_mesh.device_type
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(rows), mesh_dim_names=names)

    def union(self, names: Iterable[str], order: Iterable[str] = ()) -> list[str]:
        """The names of all ranks, which call it together: those in `order`, which is the same on all of them, as they
        are there, then others as ranks have them. Only stages of a pipeline have different names; without them this is
        what it is given, and nothing is sent."""
        own = list(names)
        if self.degree("pipeline") == 1:
            return own
        everyones = collectives.all_gather_object(own, self.world)
        found = dict.fromkeys(name for each in everyones for name in each)
        return [name for name in {**dict.fromkeys(order), **found} if name in found]

    @property
    def num_replicas(self) -> int:
        """Number of parts of a batch."""
        return self.degree("replicas")

    @property
    def replica(self) -> int:
        """The index of this rank's part of a batch; ranks along other axes share it."""
        return self.index["replicas"]

    def _make_groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of this rank by axis. Axes with the same rows of ranks share one."""
        is_on_grid = self.rank < self.size
        found: dict[str, dist.ProcessGroup] = {}
        made: list[tuple[list[list[int]], Any]] = [([list(range(self.size))], self.world)]
        for axis in (axis for axis, degree in self.grid.degrees.items() if degree > 1):
            rows, group = self.grid.groups(axis), None
            if axis in self.shape:
                group = self.device_mesh.get_group(axis) if is_on_grid else None
            elif not self._is_dry and any(rows == each for each, _ in made):
                group = next(group for each, group in made if rows == each)
            else:
                group = dist.new_subgroups_by_enumeration(rows)[0]  # type: ignore[no-untyped-call]
            made.append((rows, group))
            if group is not None and is_on_grid:
                found[axis] = group
        return found
