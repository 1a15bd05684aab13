"""How a run's tables are spread over several ranks: as the options say, or by size and by what a step needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kitforge.core.optim.row_optimizers import build_row_optimizer
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.sharding.planner import (
    SHARDING_TYPES,
    ShardingPlannerOptions,
    ShardingType,
    TableLoad,
    TablePlacement,
    build_sharding,
    plan_sharding,
)
from kitforge.embedding_cache.sharding.strategies import TableSharding
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.log import console
from kitforge.kits.recommender.config import CacheOptions, RecommendationOptions
from kitforge.kits.recommender.embedding_requests import EmbeddingRequestPlan

EMPTY: Mapping[str, float] = MappingProxyType({})
# Rows of a table whose ids are any 64 bits.
_UNBOUNDED = 2**63
_DESCRIPTIONS = {"row": "by rows", "column": "by columns", "replicate": "on all ranks"}


def shard_tables(
    plan: EmbeddingRequestPlan, options: RecommendationOptions, world: World, distinct: Mapping[str, float]
) -> dict[str, TableSharding]:
    """How each table is spread; nothing on a single rank. Raises ConfigError for a placement that cannot be."""
    if world.mesh is None:
        return {}
    # What is not known to be needed little is needed by every sample.
    default = float(options.data.step_size)
    loads = {
        name: TableLoad(
            num_rows=table.num_rows or _UNBOUNDED,
            dim=table.dim,
            width=build_row_optimizer(options.tables.optimizer_of(table.kind)).layout(table.dim).width,
            distinct=distinct.get(name, default),
            optimizer=options.tables.optimizer_of(table.kind).name,
            sharding_types=_sharding_types(options.cache, world),
        )
        for name, table in plan.tables.items()
    }
    placements = assign_sharding(loads, options.cache, world.mesh.size)
    if world.rank == 0 and options.trainer.progress:
        words = f"tables on {world.mesh.size} ranks: {describe_placements(placements, loads)}"
        console.print(words, markup=False, highlight=False)
    side_group = world.mesh.new_cpu_group()
    return {name: build_sharding(placements[name], load, world.mesh.world, side_group) for name, load in loads.items()}


def assign_sharding(loads: Mapping[str, TableLoad], cache: CacheOptions, num_ranks: int) -> dict[str, TablePlacement]:
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
        expected = f"auto or {' or '.join(loads[name].sharding_types)} with these options"
        check(way == "auto" or way in loads[name].sharding_types, "cache.placement", way, expected)
    chosen = plan_sharding(loads, num_ranks, ShardingPlannerOptions())
    fixed = {
        name: TablePlacement(sharding_type=way, owner=0 if way == "table" else None)
        for name, way in said.items()
        if way != "auto"
    }
    return chosen | fixed


def describe_placements(placements: Mapping[str, TablePlacement], loads: Mapping[str, TableLoad]) -> str:
    """The plan as words."""
    words = []
    for name, placement in placements.items():
        size = loads[name].num_bytes / 2**20
        size_text = "any number of rows" if loads[name].num_rows == _UNBOUNDED else f"{size:,.1f} MiB"
        words.append(
            f"{name} {_DESCRIPTIONS.get(placement.sharding_type) or f'on rank {placement.owner}'} ({size_text})"
        )
    return ", ".join(words)


def _sharding_types(cache: CacheOptions, world: World) -> tuple[ShardingType, ...]:
    """Rows can be anywhere; the others ask for tiers that all ranks have, and columns for rules that need no norm."""
    if cache.remote is not None or world.device.type != "cpu":
        return ("row",)
    needs_norm = cache.expiry.every and cache.expiry.min_norm is not None
    return tuple(way for way in SHARDING_TYPES if not (needs_norm and way == "column"))
