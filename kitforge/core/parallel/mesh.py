"""The device mesh: the coordinates of a rank and its process groups."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kitforge.core.parallel.config import AXES, ParallelConfig

# Axes whose ranks have different samples.
REPLICA_AXES = ("data", "shard")


@final
class Mesh:
    """The ranks as a grid of parallel axes; an axis of degree 1 has no process group.

    Views: `group(axis)` of one axis, `replicas` of all ranks with different samples (sums over the batch), `world` of
    all ranks (gradient norm, table rows).
    """

    def __init__(self, degrees: ParallelConfig, device_type: str, num_inference_ranks: int = 0) -> None:
        """`num_beside` further ranks are not on the grid; they take part in its creation only."""
        degrees.check_world(dist.get_world_size() - num_inference_ranks)
        self.degrees = degrees
        self.size = degrees.world_size
        self.rank = dist.get_rank()
        self.shape = {axis: getattr(degrees, axis) for axis in AXES if getattr(degrees, axis) > 1}
        names = tuple(self.shape)
        grid = torch.arange(self.size).view(tuple(self.shape.values()))
        self.device_mesh = DeviceMesh(device_type, grid, mesh_dim_names=names)
        world = dist.new_group(list(range(self.size))) if num_inference_ranks else dist.group.WORLD
        assert world is not None  # exists once torch.distributed is initialized
        self.world: dist.ProcessGroup = world
        self.replicas = self._view(REPLICA_AXES)

    def degree(self, axis: str) -> int:
        """Ranks along the axis."""
        return int(self.shape.get(axis, 1))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The coordinates of this rank by axis."""
        return self.index_of(self.rank)

    def index_of(self, rank: int) -> Mapping[str, int]:
        """The coordinates of a rank by axis; 0 for axes of degree 1."""
        coords = np.unravel_index(rank, tuple(self.shape.values()))
        return dict.fromkeys(AXES, 0) | {axis: int(coord) for axis, coord in zip(self.shape, coords, strict=True)}

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along the axis; None for degree 1, and for a rank that is not on the grid."""
        return self.device_mesh.get_group(axis) if axis in self.shape and self.rank < self.size else None

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A new CPU group of all ranks for a background thread, separate from the collectives of training.

        All ranks of the grid create it at the same point of the program.
        """
        group: dist.ProcessGroup = dist.new_group(
            list(range(self.size)),
            backend="gloo",
            timeout=datetime.timedelta(seconds=self.degrees.timeout),
            use_local_synchronization=self.size < dist.get_world_size(),
        )
        return group

    def sub_mesh(self, *axes: str) -> DeviceMesh:
        """The torch DeviceMesh of the axes with a degree above 1; there must be one."""
        names = tuple(axis for axis in axes if axis in self.shape)
        return self.device_mesh[names]

    @property
    def num_replicas(self) -> int:
        """Number of parts of a batch."""
        return self.degrees.num_replicas

    @property
    def replica(self) -> int:
        """The index of this rank's part of a batch; ranks along other axes share it."""
        return self.index["data"] * self.degree("shard") + self.index["shard"]

    def _view(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The group of all ranks that differ from this one only along `axes`."""
        split = [axis for axis in axes if axis in self.shape]
        if len(split) < 2:
            return self.group(split[0]) if split else None
        grid = np.arange(self.size).reshape(tuple(self.shape.values()))
        positions = [list(self.shape).index(axis) for axis in split]
        rows = np.moveaxis(grid, positions, range(-len(split), 0)).reshape(-1, int(np.prod([*map(self.degree, split)])))
        groups: tuple[dist.ProcessGroup, Any] = dist.new_subgroups_by_enumeration(rows.tolist())  # type: ignore[no-untyped-call]
        return groups[0]
