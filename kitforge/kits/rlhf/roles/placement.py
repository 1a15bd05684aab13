"""Placement of the RLHF roles (rollout, reference, reward) on ranks, and the collectives between them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.weight_sync import sync_weights
from kitforge.core.parallel.world import World
from kitforge.data.schedule import Indices
from kitforge.kits.rlhf.role_ranks import ROLES, RoleRanksOptions


class RolePlacement:
    """The roles of this rank. With one process it has all roles, and collectives are no-ops."""

    def __init__(self, placement: RoleRanksOptions, world: World) -> None:
        self._world = world
        self.ranks = {name: placement.ranks(name, world.num_training) for name in ROLES}

    def has(self, role: str) -> bool:
        """Whether the role is placed on this rank."""
        return self._world.rank in self.ranks[role]

    def local_indices(self, role: str, num_items: int) -> Indices:
        """This rank's share of `num_items` items for a role, in order; empty without the role."""
        items = np.arange(num_items, dtype=np.int64)
        if not self.has(role):
            return items[:0]
        ranks = self.ranks[role]
        return np.array_split(items, len(ranks))[ranks.index(self._world.rank)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """The plain values of all ranks, in order."""
        return collectives.all_gather_object(value, self._world.all_ranks)

    def sync_weights(self, model: nn.Module | None, rollout_model: nn.Module | None) -> None:
        """Copy the trained weights, whole or sharded over ranks, into the rollout models. A rank without a model passes
        None."""
        target: Mapping[str, Tensor] | None = None if rollout_model is None else dict(rollout_model.named_parameters())
        if model is not None or rollout_model is not None:
            parallel = None if model is None else parallel_model_of(model, self._world)
            sync_weights(parallel, target, self.ranks["rollout"], self._world)
