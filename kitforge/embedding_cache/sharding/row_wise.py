"""Row-wise sharding: each row on one rank, by a hash of its id."""

from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import owner
from kitforge.embedding_cache.sharding.strategy import OwnerSharding


class RowWise(OwnerSharding):
    """Rows are spread over the ranks by a hash of their ids."""

    def __init__(self, group: Group, prefetch_group: Group) -> None:
        super().__init__(group, prefetch_group, owner)
        self.shard = (self.rank, collectives.group_size(group))
