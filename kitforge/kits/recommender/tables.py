"""Embedding tables of a run: how they are sharded over ranks, and their lookup statistics for the report."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.nn.embedding_spec import RecommenderConfig
from kitforge.core.optim.row_optimizers import build_row_optimizer
from kitforge.core.parallel.world import World
from kitforge.data.schedule import shuffled_indices
from kitforge.embedding_cache.miss_ratio_curve import estimate
from kitforge.embedding_cache.options import CachedEmbeddingOptions as Tiers
from kitforge.embedding_cache.sharding.planner import (
    SHARDING_TYPES,
    ShardingPlannerOptions,
    ShardingType,
    TableLoad,
    TablePlacement,
    build_sharding,
    plan_sharding,
)
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.files import write_text
from kitforge.foundation.log import console
from kitforge.kits.recommender.config import CacheOptions, RecommendationOptions
from kitforge.kits.recommender.data import RecommendationDataset
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.model import EmbeddingRequestPlan, build_request_plan
from kitforge.kits.recommender.objective import Objective
from kitforge.report.tables import TABLES_FILE
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

# A hit-rate curve uses at most so many steps, the first half as warm-up, and at most so many lookups.
_MAX_STEPS, _MAX_LOOKUPS = 256, 2**17
EMPTY: Mapping[str, float] = MappingProxyType({})
# Rows of a table whose ids are any 64 bits.
_UNBOUNDED = 2**63
_DESCRIPTIONS = {"row": "by rows", "column": "by columns", "replicate": "on all ranks"}


def shard_tables(
    plan: EmbeddingRequestPlan, options: RecommendationOptions, world: World, distinct: Mapping[str, float]
) -> dict[str, TableSharding]:
    """The sharding of each table; empty on a single rank. Raises ConfigError for an invalid placement."""
    if world.mesh is None:
        return {}
    # Default: each sample needs one row of the table.
    default = float(options.data.step_size)
    ways: tuple[ShardingType, ...] = ("row",)
    if options.cache.remote is None and world.device.type == "cpu":
        # Other ways than by rows need local tiers, and columns no norms of rows.
        needs_norm = options.cache.expiry.every and options.cache.expiry.min_norm is not None
        ways = tuple(way for way in SHARDING_TYPES if not (needs_norm and way == "column"))
    loads = {
        name: TableLoad(
            num_rows=table.num_rows or _UNBOUNDED,
            dim=table.dim,
            width=build_row_optimizer(options.tables.optimizer_of(table.kind)).layout(table.dim).width,
            distinct=distinct.get(name, default),
            optimizer=options.tables.optimizer_of(table.kind).name,
            sharding_types=ways,
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
    """The sharding of each table: as the options say, else the cheapest plan. Raises ConfigError."""
    said = cache.placement if isinstance(cache.placement, dict) else dict.fromkeys(loads, cache.placement)
    for name, way in said.items():
        if name not in loads:
            problem = "option 'cache.placement' names no table of this network"
            raise ConfigError(problem, got=name, expected=f"tables {', '.join(loads)}", fix=nearest(name, loads))
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
    """The placements as text."""
    words = []
    for name, placement in placements.items():
        size = loads[name].num_bytes / 2**20
        size_text = "any number of rows" if loads[name].num_rows == _UNBOUNDED else f"{size:,.1f} MiB"
        words.append(
            f"{name} {_DESCRIPTIONS.get(placement.sharding_type) or f'on rank {placement.owner}'} ({size_text})"
        )
    return ", ".join(words)


class TableStatsCallback(Callback):
    """Writes tables.jsonl: hit-rate curves when the run starts, then the counts of each table since the last line."""

    def __init__(self, curves: Callable[[], list[dict[str, Any]]]) -> None:
        self._curves = curves
        self._before: dict[str, dict[str, Counter[str]]] = {}

    def on_event(self, event: Event, run: RunContext) -> None:
        """Write the curves at the start, a line at each log. A resumed run keeps the lines up to its step."""
        if run.folder is None or run.world.rank > 0 or event.kind not in ("start", "log"):
            return
        path = run.folder / TABLES_FILE
        if event.kind == "start":
            if run.state.cursor.step and path.exists():
                lines = path.read_text(encoding="utf-8").splitlines()
                lines = [each for each in lines if _is_before(each, run.state.cursor.step)]
            else:
                lines = [json.dumps(record) for record in self._curves()]
            write_text(path, "".join(each + "\n" for each in lines))
            return
        tables = {each.options.name: each for each in run.model.modules() if isinstance(each, CachedEmbedding)}
        line = {"kind": "tables", "step": run.state.cursor.step, "tables": {}}
        line["tables"] = {name: self._since(name, table) for name, table in tables.items()}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _since(self, name: str, table: CachedEmbedding) -> dict[str, dict[str, int]]:
        stats = table.stats()
        now = {"hits": Counter(stats.hits), "moved": Counter(stats.moved)}
        before = self._before.get(name, {"hits": Counter(), "moved": Counter()})
        self._before[name] = now
        return {what: {tier: count - before[what][tier] for tier, count in now[what].items()} for what in now}


def hit_rate_curves(
    config: RecommenderConfig, options: RecommendationOptions, dataset: RecommendationDataset, objective: Objective[Any]
) -> Callable[[], list[dict[str, Any]]]:
    """A function that estimates each table's hit rate by device-tier size, from the first batches of a run."""

    def make() -> list[dict[str, Any]]:
        if not isinstance(dataset.train, ClickDataset):
            return []
        plan, size = build_request_plan(config, dataset.encoder), options.data.step_size
        steps = min(options.trainer.max_steps or _MAX_STEPS, _MAX_STEPS)
        curves = []
        for name, batches in sample_lookups(plan, options, dataset.train, objective, size, steps).items():
            table = plan.tables[name]
            width = build_row_optimizer(options.tables.optimizer_of(table.kind)).layout(table.dim).width
            tiers = Tiers(num_embeddings=table.num_rows, dim=table.dim)
            rate = min(1.0, _MAX_LOOKUPS / sum(ids.numel() for ids in batches))
            points = estimate(tiers, width, batches, warm_up=len(batches) // 2, sample_rate=rate).curve()
            curves.append({"kind": "curve", "table": name, "points": np.array(points).tolist()})
        return curves

    return make


def sample_lookups(
    plan: EmbeddingRequestPlan,
    options: RecommendationOptions,
    rows: ClickDataset,
    objective: Objective[Any],
    size: int,
    num_steps: int,
) -> dict[str, list[Tensor]]:
    """The ids looked up in every table in the first steps of `size` samples."""
    size, ids = min(size, rows.num_rows), dict[str, list[Tensor]]()
    for step in range(num_steps):
        indices = shuffled_indices(options.seed, rows.num_rows, step * size, size, shuffle=options.data.shuffle)
        part = objective.micro_batch(objective.read(rows, indices, slice(0, size), step), 0, size)
        for name, request in (item for call in part["calls"] for item in call.items()):
            ids.setdefault(plan.features[name], []).append(request[0] if isinstance(request, tuple) else request)
    return ids


def distinct_rows(
    config: RecommenderConfig, options: RecommendationOptions, dataset: RecommendationDataset, objective: Objective[Any]
) -> dict[str, float]:
    """The distinct rows of each table that a replica needs in the first step; empty for streams."""
    if not isinstance(dataset.train, ClickDataset):
        return {}
    size = -(-options.data.step_size // options.parallel.num_replicas)
    lookups = sample_lookups(build_request_plan(config, dataset.encoder), options, dataset.train, objective, size, 1)
    return {
        name: float(len(torch.unique(torch.cat([ids.flatten() for ids in each])))) for name, each in lookups.items()
    }


def _is_before(line: str, step: int) -> bool:
    """Whether a line is complete and not after `step`."""
    try:
        return int(json.loads(line).get("step", 0)) <= step
    except ValueError:
        return False
