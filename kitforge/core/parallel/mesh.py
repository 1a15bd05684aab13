"""One rank's place among all, and the groups of ranks that it talks to."""

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

# Axes whose ranks hold different samples.
REPLICA_AXES = ("data", "shard")


@final
class Mesh:
    """The world as a grid of the axes that are split; an axis of degree 1 costs no process group.

    Views: `group(axis)` of one axis, `replicas` of all ranks that hold different samples (their sums are those of the
    batch), `world` of all ranks (the norm, and the rows of tables).
    """

    def __init__(self, degrees: ParallelConfig, device_type: str, num_inference_ranks: int = 0) -> None:
        """`num_beside` further ranks have no place on the grid; they make it with the others, and no use of it."""
        degrees.check_world(dist.get_world_size() - num_inference_ranks)
        self.degrees = degrees
        self.size = degrees.world_size
        self.rank = dist.get_rank()
        self.shape = {axis: getattr(degrees, axis) for axis in AXES if getattr(degrees, axis) > 1}
        names = tuple(self.shape)
        grid = torch.arange(self.size).view(tuple(self.shape.values()))
        self.device_mesh = DeviceMesh(device_type, grid, mesh_dim_names=names)
        world = dist.new_group(list(range(self.size))) if num_inference_ranks else dist.group.WORLD
        assert world is not None  # there is one as soon as torch.distributed is initialised
        self.world: dist.ProcessGroup = world
        self.replicas = self._view(REPLICA_AXES)

    def degree(self, axis: str) -> int:
        """Ranks along the axis."""
        return int(self.shape.get(axis, 1))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """This rank's place along every axis."""
        return self.index_of(self.rank)

    def index_of(self, rank: int) -> Mapping[str, int]:
        """A rank's place along every axis; 0 along those that are not split."""
        coords = np.unravel_index(rank, tuple(self.shape.values()))
        return dict.fromkeys(AXES, 0) | {axis: int(coord) for axis, coord in zip(self.shape, coords, strict=True)}

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along the axis through this one; None where it is not split, and for a rank beside the grid."""
        return self.device_mesh.get_group(axis) if axis in self.shape and self.rank < self.size else None

    def new_cpu_group(self) -> dist.ProcessGroup:
        """A new group of all ranks, on the CPU, for a background thread whose words must not mix with the training's.

        All ranks of the grid make it at the same point of the program.
        """
        group: dist.ProcessGroup = dist.new_group(
            list(range(self.size)),
            backend="gloo",
            timeout=datetime.timedelta(seconds=self.degrees.timeout),
            use_local_synchronization=self.size < dist.get_world_size(),
        )
        return group

    def sub_mesh(self, *axes: str) -> DeviceMesh:
        """torch's own mesh of those axes that are split; at least one must be."""
        names = tuple(axis for axis in axes if axis in self.shape)
        return self.device_mesh[names]

    @property
    def num_replicas(self) -> int:
        """Ranks among which a batch is divided."""
        return self.degrees.num_replicas

    @property
    def replica(self) -> int:
        """Which share of a batch this rank has; ranks along other axes have the same."""
        return self.index["data"] * self.degree("shard") + self.index["shard"]

    def _view(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The group of all ranks that differ from this one along `axes` only."""
        split = [axis for axis in axes if axis in self.shape]
        if len(split) < 2:
            return self.group(split[0]) if split else None
        grid = np.arange(self.size).reshape(tuple(self.shape.values()))
        positions = [list(self.shape).index(axis) for axis in split]
        rows = np.moveaxis(grid, positions, range(-len(split), 0)).reshape(-1, int(np.prod([*map(self.degree, split)])))
        groups: tuple[dist.ProcessGroup, Any] = dist.new_subgroups_by_enumeration(rows.tolist())  # type: ignore[no-untyped-call]
        return groups[0]
