"""Data-parallel tables: all rows on all ranks."""

import torch
from torch import Tensor

from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import ExchangePlan
from kitforge.embedding_cache.sharding.strategy import Deliver, FetchRows, TableSharding, all_gather_rows


class Replicated(TableSharding):
    """A lookup sends nothing; a step all-reduces the gradients."""

    def __init__(self, group: Group, prefetch_group: Group) -> None:
        super().__init__(group, prefetch_group)
        self.counts_for_norm = self.saves_rows = self.rank == 0

    def plan_exchange(self, keys: Tensor, ahead: bool) -> None:
        """See `TableSharding`: all rows are here."""

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """Never called: there is no exchange."""
        raise NotImplementedError

    def all_gather_keys(self, keys: Tensor, ahead: bool) -> Tensor:
        """The distinct keys of all ranks, ascending. `ahead`: called by the prefetch thread."""
        asked, _ = all_gather_rows(keys, self._groups[ahead])
        distinct: Tensor = torch.unique(asked)
        return distinct

    def all_reduce_gradients(self, keys: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct keys and summed gradients of all ranks."""
        all_keys, _ = all_gather_rows(keys, self._groups[False])
        parts, _ = all_gather_rows(gradients, self._groups[False])
        distinct, positions = torch.unique(all_keys, return_inverse=True)
        return distinct, parts.new_zeros(len(distinct), parts.shape[1]).index_add_(0, positions, parts)
