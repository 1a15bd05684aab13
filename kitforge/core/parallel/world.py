"""Where a run takes place: a device, and a mesh when there is more than one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A rank's view of the run. Alone, every sum is the value itself and every question its own answer."""

    device: torch.device
    mesh: Mesh | None = None

    @property
    def rank(self) -> int:
        """This rank's number; rank 0 writes files and speaks to people."""
        return 0 if self.mesh is None else self.mesh.rank

    @property
    def replica(self) -> int:
        """Which share of every batch is this rank's."""
        return 0 if self.mesh is None else self.mesh.replica

    @property
    def num_replicas(self) -> int:
        """Among how many ranks a batch is divided."""
        return 1 if self.mesh is None else self.mesh.num_replicas

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds pieces of networks only."""
        return self.mesh is not None and max(self.mesh.degree("shard"), self.mesh.degree("tensor")) > 1

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """0-dim values summed over the replicas, in float64 and on the CPU where there is more than one."""
        if self.mesh is None or self.mesh.replicas is None or not values:
            return dict(values)
        stacked = torch.stack([value.detach().to(self.device, torch.float64) for value in values.values()])
        totals = collectives.all_reduce_(stacked, self.mesh.replicas).cpu()
        return dict(zip(values, totals, strict=True))

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        if self.mesh is None:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        return bool(collectives.all_reduce_(flags, self.mesh.world, collectives.MAX) > 0)

    def agree(self, value: Any) -> list[Any]:
        """Every rank's plain value, in rank order; just this one's when alone."""
        return collectives.gather_objects(value, None if self.mesh is None else self.mesh.world)

    def agree_replicas(self, value: Any) -> list[Any]:
        """The plain value of every replica, in their order; ranks that share one have the same."""
        found = self.agree(value)
        if self.mesh is None:
            return found
        places = [self.mesh.index_of(rank) for rank in range(len(found))]
        return [each for each, place in zip(found, places, strict=True) if place["tensor"] == 0]

    def first(self, value: Any) -> Any:
        """Rank 0's value on all ranks."""
        return self.agree(value)[0]


# A run of one process on the CPU.
ALONE = World(device=torch.device("cpu"))
