"""Row-wise and table-wise sharding: each row whole on one rank, by a hash of its id, or all rows of a table on one."""

from abc import ABC

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import EmbeddingExchange, ExchangePlan, OwnerOf, owner
from kitforge.embedding_cache.sharding.strategy import Deliver, FetchRows, TableSharding


class OwnerSharding(TableSharding, ABC):
    """Each row lives whole on one rank, its owner."""

    def __init__(self, group: Group, prefetch_group: Group, owner_of: OwnerOf) -> None:
        super().__init__(group, prefetch_group)
        self._exchanges = {ahead: EmbeddingExchange(each, owner_of) for ahead, each in self._groups.items()}

    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan:
        return self._exchanges[ahead].plan(keys)

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        return self._exchanges[False].fetch(route, lambda _: rows(), _GradientForwarder(deliver))


class RowWise(OwnerSharding):
    """Rows are spread over the ranks by a hash of their ids."""

    def __init__(self, group: Group, prefetch_group: Group) -> None:
        super().__init__(group, prefetch_group, owner)
        self.shard = (self.rank, collectives.group_size(group))


class TableWise(OwnerSharding):
    """All rows live on the rank `table_owner`."""

    def __init__(self, group: Group, prefetch_group: Group, table_owner: int) -> None:
        super().__init__(group, prefetch_group, lambda ids, _: torch.full_like(ids, table_owner))
        self.holds_ids = self.rank == table_owner


class _GradientForwarder:
    """A `GradientReceiver` that passes gradients on without the ids, which are those of the plan."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def add(self, ids: Tensor, gradients: Tensor) -> None:
        self._deliver(gradients)
