"""Who does what in a run of rewards: each fragment of the algorithm on ranks of its own, or on those that train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from torch import Tensor, nn

from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.weight_sync import sync_weights
from kitforge.core.parallel.world import World
from kitforge.kits.rlhf.config import FRAGMENTS, PlacementOptions
from kitforge.kits.rlhf.order import Indices


@final
class Fragments:
    """The part of this rank. Alone it has all of it, and what is exchanged is its own."""

    def __init__(self, placement: PlacementOptions, world: World) -> None:
        self._world = world
        self._ranks = {name: placement.ranks(name, world.num_training) for name in FRAGMENTS}

    def has(self, fragment: str) -> bool:
        """Whether this rank has a part in it."""
        return self._world.rank in self._ranks[fragment]

    def are_together(self, one: str, other: str) -> bool:
        """Whether the same ranks have both."""
        return self._ranks[one] == self._ranks[other]

    @property
    def needs_copy(self) -> bool:
        """Whether this rank draws with networks of its own: it trains none, or has pieces only of those it trains."""
        return self.has("rollout") and (self._world.is_inference_only or self._world.is_sharded)

    def share(self, fragment: str, num_items: int) -> Indices:
        """This rank's part of so many items, in order; nothing where it has no part in the fragment."""
        items = np.arange(num_items, dtype=np.int64)
        if not self.has(fragment):
            return items[:0]
        ranks = self._ranks[fragment]
        return np.array_split(items, len(ranks))[ranks.index(self._world.rank)]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value, in their order."""
        return collectives.all_gather_object(value, self._world.all_ranks)

    def first(self, value: Any) -> Any:
        """Rank 0's plain value."""
        return collectives.broadcast_object(value, self._world.all_ranks)

    def hand_over(self, model: nn.Module | None, whole: nn.Module | None) -> None:
        """Fill the `whole` networks of the ranks that draw with what is trained, of which `model` may be a piece; None
        on ranks that have none."""
        target: Mapping[str, Tensor] | None = None if whole is None else dict(whole.named_parameters())
        if model is not None or whole is not None:
            parallel = None if model is None else parallel_model_of(model, self._world)
            sync_weights(parallel, target, self._ranks["rollout"], self._world)
