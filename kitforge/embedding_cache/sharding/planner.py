"""The sharding planner: chooses row-wise, column-wise, table-wise or replicated sharding for each table.

It minimises the bytes that the busiest rank sends and receives in a step, from the sizes of the tables and the number
of distinct rows of a step. It changes no number, only which rank holds which rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kitforge.core.optim.row_optimizers import SparseOptimizerName
from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.embedding_cache.sharding.by_owner import RowWise, TableWise
from kitforge.embedding_cache.sharding.column_wise import ColumnWise
from kitforge.embedding_cache.sharding.replicated import Replicated
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.foundation.config import check

ShardingType = Literal["row", "column", "table", "replicate"]
SHARDING_TYPES: tuple[ShardingType, ...] = ("row", "column", "table", "replicate")
# Optimizers that update every number of a row by itself, so that a row may be split.
ELEMENTWISE_OPTIMIZERS = ("sgd", "adagrad", "adam", "lazy_adam", "ftrl")
# Smaller messages take as long as one of this size.
MESSAGE_BYTES = 4096
ID_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLoad:
    """The size of a table and of its lookups."""

    num_rows: int
    dim: int
    width: int  # numbers of a row with its optimizer state
    distinct: float  # rows that a rank needs in a step
    optimizer: SparseOptimizerName = "adagrad"
    sharding_types: tuple[ShardingType, ...] = SHARDING_TYPES  # allowed; "row" is always one of them

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return 4 * self.width * self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """The sharding of one table."""

    sharding_type: ShardingType
    owner: int | None = None  # table: the rank that holds all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlannerOptions:
    """Limits of the planner."""

    replicated_bytes: int = 64 * 2**20  # memory of each rank for replicated tables
    small_bytes: int = 2**20  # tables up to this size are replicated: their lookups need no exchange

    def __post_init__(self) -> None:
        check(self.replicated_bytes >= 0, "placement.replicated_bytes", self.replicated_bytes, "0 or more")
        check(self.small_bytes >= 0, "placement.small_bytes", self.small_bytes, "0 or more")


def plan_sharding(
    loads: Mapping[str, TableLoad], num_ranks: int, options: ShardingPlannerOptions
) -> dict[str, TablePlacement]:
    """Replicates small tables as far as memory allows, the smallest first; shards the others at the lowest cost."""
    room, owned = options.replicated_bytes, [0.0] * num_ranks
    chosen: dict[str, TablePlacement] = {}
    for name, load in sorted(loads.items(), key=lambda item: (item[1].num_bytes, item[0])):
        costs = step_bytes(load, num_ranks)
        if num_ranks > 1 and load.num_bytes > room:
            costs.pop("replicate", None)
        is_small = "replicate" in costs and load.num_bytes <= options.small_bytes
        way: ShardingType = "replicate" if is_small else min(costs, key=lambda way: (costs[way], way))
        if way == "replicate":
            room -= load.num_bytes
        owner = None
        if way == "table":
            owner = owned.index(min(owned))
            owned[owner] += load.num_bytes
        chosen[name] = TablePlacement(sharding_type=way, owner=owner)
    return {name: chosen[name] for name in loads}


def step_bytes(load: TableLoad, num_ranks: int) -> dict[ShardingType, float]:
    """The bytes that the busiest rank sends and receives in a step, by sharding type.

    Row-wise, each id goes to one rank, and a vector and a gradient come and go; the hash gives the busiest rank about
    two deviations more than its share. Column-wise, ids go to all ranks, and shares are equal. Replicated, only
    gradients go, but to all ranks. Table-wise, one rank gets all requests: cheapest where they are few messages.
    """
    if num_ranks == 1:
        return {"replicate": 0.0}
    needed, vector, others = load.distinct, 4.0 * load.dim, num_ranks - 1
    fraction = others / num_ranks
    excess = 2.0 * math.sqrt(num_ranks / needed) if needed else 0.0

    def messages(num_bytes: float, num: int) -> float:
        return max(num_bytes, float(MESSAGE_BYTES * num))

    costs: dict[ShardingType, float] = {
        "row": messages(fraction * needed * (ID_BYTES + 2 * vector) * (1 + excess), 3 * others),
        "table": messages(others * needed * (ID_BYTES + 2 * vector), 3),
        "replicate": messages(others * min(needed, load.num_rows) * (ID_BYTES + vector), 2 * others),
    }
    if load.optimizer in ELEMENTWISE_OPTIMIZERS and load.dim % num_ranks == 0:
        costs["column"] = messages(others * needed * ID_BYTES + fraction * needed * 2 * vector, 3 * others)
    return {way: cost for way, cost in costs.items() if way in load.sharding_types}


def build_sharding(placement: TablePlacement, load: TableLoad, group: Group, prefetch_group: Group) -> TableSharding:
    """The `sharding` argument of a table. `prefetch_group` holds the same ranks, for the prefetch thread.

    Raises ConfigError for column-wise sharding with an optimizer that cannot split rows.
    """
    if placement.sharding_type == "column":
        fix = "choose another sharding type, or an optimizer that updates each number by itself"
        check(
            load.optimizer in ELEMENTWISE_OPTIMIZERS,
            "sparse_optimizer.name",
            load.optimizer,
            " or ".join(ELEMENTWISE_OPTIMIZERS),
            fix,
        )
        return ColumnWise(group, prefetch_group, load.dim)
    if placement.sharding_type == "replicate":
        return Replicated(group, prefetch_group)
    if placement.sharding_type == "table":
        num_ranks, table_owner = collectives.group_size(group), -1 if placement.owner is None else placement.owner
        check(0 <= table_owner < num_ranks, "placement.owner", placement.owner, f"a rank from 0 to {num_ranks - 1}")
        return TableWise(group, prefetch_group, table_owner)
    return RowWise(group, prefetch_group)
