"""How a run's tables are spread over several ranks: as the options say, or by size and by what a step needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kitforge.core.optim.sparse import build_row_optimizer
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.placement import (
    WAYS,
    Placement,
    PlacementOptions,
    TableLoad,
    Way,
    choose,
    spread_of,
)
from kitforge.embedding_cache.spread import Spread
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.log import console
from kitforge.kits.recommender.config import CacheOptions, RecommendationOptions
from kitforge.kits.recommender.lookups import LookupPlan

EMPTY: Mapping[str, float] = MappingProxyType({})
# Rows of a table whose ids are any 64 bits.
_UNBOUNDED = 2**63
_WORDS = {"row": "by rows", "column": "by columns", "replicate": "on all ranks"}


def spread_tables(
    plan: LookupPlan, options: RecommendationOptions, world: World, distinct: Mapping[str, float]
) -> dict[str, Spread]:
    """How each table is spread; nothing on a single rank. Raises ConfigError for a placement that cannot be."""
    if world.mesh is None:
        return {}
    # What is not known to be needed little is needed by every sample.
    default = float(options.data.step_size)
    loads = {
        name: TableLoad(
            num_rows=table.num_rows or _UNBOUNDED,
            dim=table.dim,
            width=build_row_optimizer(options.tables.rule(table.kind)).layout(table.dim).width,
            distinct=distinct.get(name, default),
            optimizer=options.tables.rule(table.kind).name,
            ways=_ways(options.cache, world),
        )
        for name, table in plan.tables.items()
    }
    placements = place(loads, options.cache, world.mesh.size)
    if world.rank == 0 and options.trainer.progress:
        words = f"tables on {world.mesh.size} ranks: {described(placements, loads)}"
        console.print(words, markup=False, highlight=False)
    side_group = world.mesh.side_group()
    return {name: spread_of(placements[name], load, world.mesh.world, side_group) for name, load in loads.items()}


def place(loads: Mapping[str, TableLoad], cache: CacheOptions, num_ranks: int) -> dict[str, Placement]:
    """Where each table goes: as the options say, and the others as is cheapest. Raises ConfigError."""
    said = cache.placement if isinstance(cache.placement, dict) else dict.fromkeys(loads, cache.placement)
    for name, way in said.items():
        if name not in loads:
            expected = f"tables {', '.join(loads)}"
            raise ConfigError(
                "option 'cache.placement' names no table of this network",
                got=name,
                expected=expected,
                fix=nearest(name, loads),
            )
        expected = f"auto or {' or '.join(loads[name].ways)} with these options"
        check(way == "auto" or way in loads[name].ways, "cache.placement", way, expected)
    chosen = choose(loads, num_ranks, PlacementOptions())
    fixed = {
        name: Placement(way=way, owner=0 if way == "table" else None) for name, way in said.items() if way != "auto"
    }
    return chosen | fixed


def described(placements: Mapping[str, Placement], loads: Mapping[str, TableLoad]) -> str:
    """The plan as words."""
    words = []
    for name, placement in placements.items():
        size = loads[name].num_bytes / 2**20
        told = "any number of rows" if loads[name].num_rows == _UNBOUNDED else f"{size:,.1f} MiB"
        words.append(f"{name} {_WORDS.get(placement.way) or f'on rank {placement.owner}'} ({told})")
    return ", ".join(words)


def _ways(cache: CacheOptions, world: World) -> tuple[Way, ...]:
    """Rows can be anywhere; the others ask for tiers that all ranks have, and columns for rules that need no norm."""
    if cache.remote is not None or world.device.type != "cpu":
        return ("row",)
    needs_norm = cache.forgetting.every and cache.forgetting.norm is not None
    return tuple(way for way in WAYS if not (needs_norm and way == "column"))
