"""Rows and tables that stand in for those of a run, for plans: ids that seldom repeat, and tables that are full."""

from typing import Any

import numpy as np
from torch import Tensor

from kitforge.embedding_cache.keys.slot_map import INITIAL_ROOM
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.schema import FeatureSchema

# Ids of a bag, of which the schema does not say how many it has.
IDS_OF_A_BAG = 8


def dry_rows(schema: FeatureSchema, num_rows: int) -> dict[str, Any]:
    """Columns of so many rows, whose ids are drawn evenly, and whose lists are as long as they may be."""
    layout, generator = schema.layout(), np.random.default_rng(0)
    columns: dict[str, Any] = {name: generator.random(num_rows) for name in layout.numbers}

    def ids(kind: str, *shape: int) -> Any:
        drawn = generator.integers(0, 2**40, shape)
        return drawn if kind == "integer" else drawn.astype(str)

    columns |= {each.name: ids(each.kind, num_rows) for each in layout.keys}
    for each in layout.lists:
        own = [one for name, one in schema.sequences.items() if schema.source_column(name) == each.name]
        length = max((one.max_length for one in own), default=IDS_OF_A_BAG)
        columns[each.name] = list(ids(each.kind, num_rows, length))
    if layout.label is not None:
        positive, negative = layout.label.positive, layout.label.negative
        both = [1 if positive is None else positive, 0 if positive is None else negative or "other"]
        columns[layout.label.name] = [both[row % 2] for row in range(num_rows)]
    return columns


def fill_table(table: CachedEmbedding) -> tuple[Tensor, int, list[Tensor]]:
    """Let the tiers in memory have room for all rows of this rank, which doubles while rows come: the rows of the
    device, how many of them there were before they grew for the last time, and those of the host. Raises ConfigError
    for a table whose rows nothing bounds."""
    device, host, wanted = table.rows.device, table.rows.tiers.upper, table.options.num_embeddings
    wanted = None if wanted is None else -(-wanted // table.shard[1])
    if device.capacity is None and wanted is None:
        raise ConfigError(
            f"nothing bounds the rows of the table {table.options.name!r}",
            got="ids of any 64 bits, and cache.device_rows=null",
            expected="the rows that a rank will hold",
            fix="plan with cache.device_rows=N, or with data.schema encoding=hash and num_buckets=N",
        )
    if isinstance(host, HostStore) and host.capacity is None and wanted is not None:
        host.grow(_doubled(wanted - (device.capacity or 0)))
    below = [host.slab] if isinstance(host, HostStore) else []
    if device.capacity is not None or wanted is None:
        return device.slab, 0, below
    room = _doubled(wanted)
    device.make_room(room - device.index.room + device.index.num_free)
    return device.slab, room // 2 if room > INITIAL_ROOM else 0, below


def _doubled(wanted: int) -> int:
    room = INITIAL_ROOM
    while room < wanted:
        room *= 2
    return room
