"""Table-wise sharding: the whole table on one rank."""

import torch

from kitforge.core.parallel.collectives import Group
from kitforge.embedding_cache.sharding.strategy import OwnerSharding


class TableWise(OwnerSharding):
    """All rows live on the rank `table_owner`."""

    def __init__(self, group: Group, prefetch_group: Group, table_owner: int) -> None:
        super().__init__(group, prefetch_group, lambda ids, _: torch.full_like(ids, table_owner))
        self.holds_ids = self.rank == table_owner
