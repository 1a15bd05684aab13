"""The world of a run: a device, and with several ranks a mesh of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import MODEL_AXES, ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.rank_errors import FailureMonitor
from kitforge.foundation.dtype import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRanks:
    """Marks a world with ranks that do not train, after those that do."""

    all_ranks: dist.ProcessGroup  # of all ranks, on the CPU
    num_training: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A rank's view of the run. With one process all collectives are no-ops.

    The mesh is that of the training ranks; an inference-only rank has none.
    """

    device: torch.device
    mesh: Mesh | None = None
    inference_ranks: InferenceRanks | None = None
    failure_monitor: FailureMonitor | None = None
    precision: Precision = "fp32"  # in which `shard` gathers weights
    planned_type: str | None = None  # of the device that the CPU stands in for

    @classmethod
    def of_process_group(
        cls, degrees: ParallelConfig, device: torch.device, watch: FailureMonitor | None = None
    ) -> World:
        """The world of this rank in the default process group. The first ranks train, as many as the degrees need. All
        ranks call this together."""
        num_further = dist.get_world_size() - degrees.world_size
        mesh = Mesh(degrees, device.type, num_further) if degrees.world_size > 1 else None
        if num_further == 0:
            return cls(device=device, mesh=mesh, failure_monitor=watch)
        all_ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=degrees.timeout))
        inference = InferenceRanks(all_ranks=all_ranks, num_training=degrees.world_size)
        own = mesh if dist.get_rank() < degrees.world_size else None
        return cls(device=device, mesh=own, inference_ranks=inference, failure_monitor=watch)

    def with_precision(self, precision: Precision) -> World:
        """The same world with another precision."""
        return replace(self, precision=precision)

    @property
    def device_type(self) -> str:
        """The type of the device of the run, which a plan has not."""
        return self.planned_type or self.device.type

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 writes files and messages."""
        return collectives.group_rank(self.all_ranks) if self.mesh is None else self.mesh.rank

    @property
    def all_ranks(self) -> collectives.Group:
        """The group of all ranks, including inference-only ones; None with one process."""
        if self.inference_ranks is not None:
            return self.inference_ranks.all_ranks
        return None if self.mesh is None else self.mesh.world

    @property
    def num_training(self) -> int:
        """Number of training ranks, which are the first ones."""
        if self.inference_ranks is not None:
            return self.inference_ranks.num_training
        return 1 if self.mesh is None else self.mesh.size

    @property
    def is_training(self) -> bool:
        """Whether this rank trains."""
        return self.rank < self.num_training

    @property
    def replica(self) -> int:
        """Index of the data-parallel replica: its part of every batch."""
        return 0 if self.mesh is None else self.mesh.replica

    @property
    def num_replicas(self) -> int:
        """Number of parts of a batch."""
        return 1 if self.mesh is None else self.mesh.num_replicas

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards of networks or rows only, so that they need one another in every pass."""
        return self.mesh is not None and any(self.mesh.degree(axis) > 1 for axis in ("shard", *MODEL_AXES))

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values summed over replicas; with several, in float64 on the CPU."""
        if self.mesh is None or self.mesh.replicas is None or not values:
            return dict(values)
        flats = [value.detach().to(self.device, torch.float64).flatten() for value in values.values()]
        joined = collectives.all_reduce_(torch.cat(flats), self.mesh.replicas).cpu()
        totals = torch.split(joined, [len(each) for each in flats])
        return {name: total.view_as(values[name]) for name, total in zip(values, totals, strict=True)}

    def any(self, flag: bool) -> bool:
        """Whether the value is true on any rank, including inference-only ones."""
        if self.mesh is None and self.inference_ranks is None:
            return flag
        flags = torch.tensor(float(flag), device=self.device if self.inference_ranks is None else "cpu")
        return bool(collectives.all_reduce_(flags, self.all_ranks, collectives.MAX) > 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The object of every training rank, in rank order."""
        return collectives.all_gather_object(value, None if self.mesh is None else self.mesh.world)

    def broadcast_object(self, value: Any) -> Any:
        """The object of rank 0 on all ranks, including inference-only ones."""
        return collectives.broadcast_object(value, self.all_ranks)

    def publish_failure(self, error: BaseException) -> None:
        """Report a failure of this rank to the launcher and the other ranks at once, without a collective."""
        if self.failure_monitor is not None:
            self.failure_monitor.publish(error)


# A run of one process on the CPU.
ALONE = World(device=torch.device("cpu"))
