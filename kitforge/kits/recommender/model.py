"""The recommender: embedding requests of a batch, tables, and the network over their vectors.

Features with a bounded number of ids share one table per width, each with a range of rows; a feature of any 64-bit ids
has its own. So most batches need one call for the wide part and one for the deep part.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, RecommenderConfig, SampleShape, TableKind
from kitforge.core.nn.init import normal_rows
from kitforge.core.nn.named_modules import NamedModules
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.device import copy_to
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import CacheOptions, EmbeddingTableOptions
from kitforge.kits.recommender.features import FeatureEncoder, FeatureStatistics, TableSpec
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.models.catalog import build_recommender

# Suffix of the indicator of missing values.
MISSING_SUFFIX = " is missing"
# ids [N, n], or flat ids and offsets [B + 1].
EmbeddingRequest = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTable:
    """An embedding table, and the first row of each feature table stacked in it."""

    name: str
    kind: TableKind
    dim: int
    num_rows: int | None  # None: any int64 is an id
    starts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableCall:
    """One embedding call: features of one lookup in one table with the same input form."""

    key: str
    table: StackedTable
    features: tuple[str, ...]
    starts: Tensor  # [features]


class EmbeddingRequestPlan:
    """The embedding calls of one forward pass. `features` maps each call to its table, as EmbeddingCollection does."""

    def __init__(
        self, lookups: Sequence[EmbeddingLookup], specs: Sequence[TableSpec], shape: SampleShape, bags: Sequence[str]
    ) -> None:
        self.lookups = tuple(lookups)
        self._bags = frozenset(bags)
        self._specs = {spec.name: spec for spec in specs}
        self._shape = shape
        stacked = [
            self._stack_tables(kind, dim) for kind, dim in dict.fromkeys((each.kind, each.dim) for each in lookups)
        ]
        self.tables = {table.name: table for tables in stacked for table in tables}
        self._parts = {lookup.name: self._parts_of(lookup) for lookup in lookups}
        self.features = {part.key: part.table.name for parts in self._parts.values() for part in parts}

    def histories_of(self, item: str, features: Collection[str]) -> tuple[str, ...]:
        """The features that are sequences over the table of the feature `item`."""
        table = self._shape.table_of(item)
        return tuple(name for name in self._shape.sequences if name in features and self._shape.table_of(name) == table)

    def table_of(self, lookup: EmbeddingLookup, feature: str) -> tuple[str, int]:
        """The table of a feature in a lookup, and the row of the feature's first id."""
        table = self._table(lookup, feature)
        return table.name, table.starts[self._shape.table_of(feature)]

    def requests(self, batch: FeatureBatch, lookups: Collection[str] | None = None) -> dict[str, EmbeddingRequest]:
        """The input of each call; `lookups` selects lookups by name (default: all)."""
        return {
            part.key: _request(part, lookup, batch, is_bag=part.features[0] in self._bags)
            for lookup in self.lookups
            if lookups is None or lookup.name in lookups
            for part in self._parts[lookup.name]
        }

    def request_of(self, lookup: str, feature: str, ids: Tensor) -> dict[str, EmbeddingRequest]:
        """The request for single ids [n] of a feature in a lookup."""
        part = next(part for part in self._parts[lookup] if feature in part.features)
        return {part.key: (ids + part.starts[part.features.index(feature)]).unsqueeze(1)}

    def vectors(self, outputs: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The vectors by lookup, from the outputs of the calls; sequences come with `NAME.lengths`. Lookups without
        outputs are left out."""
        vectors = {}
        for lookup in (each for each in self.lookups if self._parts[each.name][0].key in outputs):
            parts = [
                _mean_of(outputs[part.key], lengths[part.features[0]])
                if lookup.pooling != "sequence" and part.features[0] in self._shape.sequences
                else outputs[part.key]
                for part in self._parts[lookup.name]
            ]
            if lookup.pooling == "sum":
                vectors[lookup.name] = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            elif lookup.pooling == "each":
                vectors[lookup.name] = self._each(lookup, parts)
            else:
                (feature,) = lookup.features
                vectors[lookup.name] = pad_sequences(parts[0], lengths[feature])
                vectors[f"{lookup.name}.lengths"] = copy_to(lengths[feature], parts[0].device)
        return vectors

    def _each(self, lookup: EmbeddingLookup, parts: Sequence[Tensor]) -> Tensor:
        """[B, F, dim] in the order of the lookup's features."""
        sizes = [len(part.features) for part in self._parts[lookup.name]]
        shaped = [part.view(-1, size, lookup.dim) for part, size in zip(parts, sizes, strict=True)]
        if len(shaped) == 1:
            return shaped[0]
        order = [feature for part in self._parts[lookup.name] for feature in part.features]
        return torch.cat(shaped, dim=1)[:, [order.index(feature) for feature in lookup.features]]

    def _stack_tables(self, kind: TableKind, dim: int) -> list[StackedTable]:
        wanted = [each for each in self.lookups if (each.kind, each.dim) == (kind, dim)]
        names = dict.fromkeys(self._shape.table_of(feature) for lookup in wanted for feature in lookup.features)
        specs = [self._specs[name] for name in names]
        starts, start = {}, 0
        for spec in specs:
            if spec.num_ids is not None:
                starts[spec.name] = start
                start += spec.num_ids
        name = kind if dim == 1 or kind == "wide" else f"{kind}_{dim}"
        shared = [StackedTable(name=name, kind=kind, dim=dim, num_rows=start, starts=starts)] if starts else []
        alone = [
            StackedTable(name=f"{name}_of_{spec.name}", kind=kind, dim=dim, num_rows=None, starts={spec.name: 0})
            for spec in specs
            if spec.num_ids is None
        ]
        return shared + alone

    def rows_of(self, feature: str, ids: Tensor) -> tuple[str, Tensor] | None:
        """A table with the rows of a feature, and those of ids [n] in it; None if no lookup reads the feature."""
        if not any(feature in lookup.features for lookup in self.lookups):
            return None
        name = self._shape.table_of(feature)
        table = next(table for table in self.tables.values() if name in table.starts)
        return table.name, ids + table.starts[name]

    def _parts_of(self, lookup: EmbeddingLookup) -> list[_TableCall]:
        """The calls of a lookup: single ids of one table share a call; each bag and each sequence has its own."""
        together: dict[tuple[str, str], list[str]] = {}
        for feature in lookup.features:
            own = feature if feature in self._bags or feature in self._shape.sequences else ""
            together.setdefault((self._table(lookup, feature).name, own), []).append(feature)
        return [
            _TableCall(
                # No two calls have one key, whatever features and tables are called.
                key=repr((lookup.name, table, own)),
                table=self.tables[table],
                features=tuple(features),
                starts=torch.tensor([self.tables[table].starts[self._shape.table_of(name)] for name in features]),
            )
            for (table, own), features in together.items()
        ]

    def _table(self, lookup: EmbeddingLookup, feature: str) -> StackedTable:
        name = self._shape.table_of(feature)
        return next(
            table
            for table in self.tables.values()
            if (table.kind, table.dim) == (lookup.kind, lookup.dim) and name in table.starts
        )


def _request(part: _TableCall, lookup: EmbeddingLookup, batch: FeatureBatch, *, is_bag: bool) -> EmbeddingRequest:
    if part.features[0] in batch.sequences:
        sequence = batch.sequences[part.features[0]]
        mask = torch.arange(sequence.ids.shape[1]) < sequence.lengths.unsqueeze(1)
        return (sequence.ids[mask] + part.starts).unsqueeze(1)
    if is_bag:
        bag = batch.bags[part.features[0]]
        return bag.ids + part.starts, bag.offsets
    ids = torch.stack([batch.ids[name] for name in part.features], dim=1) + part.starts
    return ids if lookup.pooling == "sum" else ids.view(-1, 1)


def _mean_of(rows: Tensor, lengths: Tensor) -> Tensor:
    """The means [B, dim] of consecutive rows [sum of lengths, dim]; zero for a length of zero."""
    owners = copy_to(torch.repeat_interleave(torch.arange(len(lengths)), lengths), rows.device)
    total = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, owners, rows)
    return total / copy_to(lengths.clamp(min=1).unsqueeze(1), rows.device)


def pad_sequences(rows: Tensor, lengths: Tensor, length: int | None = None) -> Tensor:
    """Rows [sum of lengths, dim] padded with zeros to [B, length, dim]; None: the longest of `lengths`, which are on
    the CPU."""
    if length is None:
        length = int(lengths.max()) if len(lengths) else 0
    positions = (torch.arange(length) < lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
    there = copy_to(positions, rows.device)
    flat = rows.new_zeros(len(lengths) * length, rows.shape[1]).index_copy(0, there, rows)
    return flat.view(len(lengths), length, rows.shape[1])


class Recommender(nn.Module):
    """A network over its embedding tables. Rows are not parameters.

    All use of the network passes through `model(compute)`: FSDP gathers the weights there.
    """

    def __init__(
        self, config: RecommenderConfig, encoder: FeatureEncoder, tables: nn.Module, level: CompileLevel = "O1"
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.requests = build_request_plan(config, encoder)
        self.network = build_recommender(config, sample_shape(encoder), select(level))
        self.tables = tables
        self.item_catalog: ItemCatalog | None = None  # the items of retrieval families
        self.checkpoint_folder: Path | None = None  # the step of a read-only model

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """The result of `compute`, cloned: `fully_shard` warns of a module that returns a view."""
        return compute().clone()

    def logits(self, inputs: Mapping[str, Any], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B] of `inputs_of` samples, for families that score rows."""
        output: Tensor = self.network(self.dense(inputs), self.vectors(inputs), dropout_key)
        return output

    def dense(self, inputs: Mapping[str, Any]) -> Tensor:
        """The dense features [B, d] on the device of the network."""
        return copy_to(inputs["dense"], next(self.network.parameters()).device)

    def vectors(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The vectors of all lookups in the inputs."""
        return self.requests.vectors(self.tables(inputs["requests"]), inputs["lengths"])


class ReadOnlyTables(nn.Module):
    """Read-only tables by name, with the interface of EmbeddingCollection."""

    anchor: Tensor

    def __init__(self, tables: Mapping[str, nn.Module], features: Mapping[str, str]) -> None:
        super().__init__()
        self.tables = NamedModules(tables)
        self.features = dict(features)
        # Moves with the module: rows are read on the CPU, and their vectors are for the network.
        self.register_buffer("anchor", torch.empty(0), persistent=False)

    def forward(self, requests: Mapping[str, EmbeddingRequest]) -> dict[str, Tensor]:
        """The vectors of every request, on the device of the module."""
        return {
            name: copy_to(
                self.tables[self.features[name]](*(request if isinstance(request, tuple) else (request,))),
                self.anchor.device,
            )
            for name, request in requests.items()
        }


def inputs_of(
    batch: FeatureBatch, plan: EmbeddingRequestPlan, lookups: Collection[str] | None = None
) -> dict[str, Any]:
    """The inputs of the network for a batch; `lookups` selects lookups by name (default: all)."""
    requests = plan.requests(batch, lookups)
    lengths = {name: sequence.lengths for name, sequence in batch.sequences.items()}
    return {"dense": batch.dense, "lengths": lengths, "requests": requests}


def sample_shape(encoder: FeatureEncoder) -> SampleShape:
    """The features of a schema, as the network's constructor needs them."""
    schema = encoder.schema
    numeric = []
    for name, feature in schema.numeric.items():
        numeric += [name, f"{name}{MISSING_SUFFIX}"] if feature.indicator else [name]
    specs = encoder.tables()
    return SampleShape(
        numeric=tuple(numeric),
        categorical=(*schema.bucketed, *schema.categorical, *schema.bags),
        crosses=tuple(schema.crosses),
        sequences=tuple(schema.sequences),
        tables={feature: spec.name for spec in specs for feature in spec.features},
        dims={feature: spec.dim for spec in specs for feature in spec.features if spec.dim is not None},
    )


def build_request_plan(config: RecommenderConfig, encoder: FeatureEncoder) -> EmbeddingRequestPlan:
    """The tables of a network over these features, and its embedding calls."""
    shape = sample_shape(encoder)
    return EmbeddingRequestPlan(config.lookups(shape), encoder.tables(), shape, tuple(encoder.schema.bags))


def build_tables(
    plan: EmbeddingRequestPlan,
    options: EmbeddingTableOptions,
    cache: CacheOptions,
    seed: int,
    world: World,
    shardings: Mapping[str, TableSharding],
) -> EmbeddingCollection:
    """The tables of a plan, without rows: rows are created at their first lookup. `shardings`: the sharding of each
    table over several ranks."""
    tables = {
        name: CachedEmbedding(
            table.num_rows,
            table.dim,
            name=name,
            # The wide part sums over all features.
            mode="sum" if table.kind == "wide" else options.pooling,
            optimizer=options.optimizer_of(table.kind),
            seed=seed,
            init_scale=0.0 if table.kind == "wide" else options.init_std,
            sharding=shardings.get(name),
            device=str(world.device),
            device_rows=cache.device_rows,
            host_rows=cache.host_rows,
            path=None if cache.path is None else str(Path(cache.path) / name),
            remote=cache.server(),
            policy=cache.policy,
            admission=cache.admission,
            expiry=cache.expiry,
            fail_on_overflow=cache.fail_on_overflow,
        )
        for name, table in plan.tables.items()
    }
    return EmbeddingCollection(tables, plan.features)


@torch.no_grad()
def init_recommender(network: nn.Module, seed: int) -> None:
    """Initialize all parameters as a pure function of (seed, name): matrices with Glorot normal (2010), biases with
    zeros, norms with ones, the linear weights of the wide part with zeros."""
    for name, parameter in network.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        if name == "linear.weight":
            parameter.zero_()
            continue
        deviation = math.sqrt(2.0 / sum(parameter.shape))
        parameter.copy_(normal_rows(seed, name, parameter.shape, 0, len(parameter)) * deviation)


@torch.no_grad()
def init_output_bias(network: nn.Module, logit: str, statistics: FeatureStatistics) -> None:
    """Set the last bias of the module `logit` to the log-odds of the positive rate of the training rows. Half a row of
    each label is added to keep it finite."""
    if statistics.positive_rate is None:
        return
    positive = statistics.positive_rate * statistics.num_rows
    *_, bias = (value for name, value in network.get_submodule(logit).named_parameters() if name.endswith("bias"))
    bias.fill_(math.log((positive + 0.5) / (statistics.num_rows - positive + 0.5)))
