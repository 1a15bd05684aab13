"""The interface of the sharding strategies of an embedding table, and what they share.

Legend: u distinct ids looked up on this rank, m distinct rows that this rank holds of those looked up on all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import ExchangePlan

# The rows [m, dim] of this rank as they are now, and what takes their gradients [m, dim].
FetchRows = Callable[[], Tensor]
Deliver = Callable[[Tensor], None]


class TableSharding(ABC):
    """Which rows of a table this rank holds, and how vectors and gradients are exchanged.

    All methods are collectives. An exchange plan holds no values, so the prefetch thread may plan ahead, on a group of
    its own.
    """

    # The columns of a row that this rank holds; None: all.
    columns: slice | None = None
    # The share of all ids that this rank holds, and of how many.
    shard: tuple[int, int] = (0, 1)
    # Whether this rank saves its rows; else another rank saves the same ones.
    saves_rows: bool = True
    # Whether this rank's gradients count for the global norm; else another rank has the same rows.
    counts_for_norm: bool = True

    def __init__(self, group: Group, prefetch_group: Group) -> None:
        self._groups = {False: group, True: prefetch_group}  # by `ahead`
        # The rank within the group.
        self.rank = collectives.group_rank(group)
        # Whether this rank holds ids at all.
        self.holds_ids = True

    @abstractmethod
    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan | None:
        """Where distinct `keys` [u] live; None: all here. `ahead`: called by the prefetch thread."""

    @abstractmethod
    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """[u, dim], differentiable: `deliver` gets the sum over the ranks, in rank order."""


def all_gather_rows(rows: Tensor, group: Group) -> tuple[Tensor, list[int]]:
    """The rows [n, ...] of all ranks, in rank order, and the number of each rank."""
    num_ranks = collectives.group_size(group)
    counts: list[int] = collectives.all_gather(torch.tensor([len(rows)]), group, 0).tolist()
    repeated = rows.repeat(num_ranks, *[1] * (rows.dim() - 1))
    return collectives.all_to_all(repeated, counts, [len(rows)] * num_ranks, group), counts
