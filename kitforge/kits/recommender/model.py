"""A network with its tables: what a run trains, and what scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import RecommenderConfig, SampleShape
from kitforge.core.nn.init import normal_rows
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.embedding_cache.sharding.strategies import TableSharding
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import CacheOptions, EmbeddingTableOptions
from kitforge.kits.recommender.embedding_requests import EmbeddingRequest, EmbeddingRequestPlan
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.statistics import FeatureStatistics
from kitforge.models.catalog import build_recommender

# Of the number that says where another one is missing.
MISSING_SUFFIX = " is missing"


@final
class Recommender(nn.Module):
    """A network over its tables, which hold rows wherever they live: rows are no parameters.

    All use of the network passes through `model(compute)`, since until then its weights may lie cut on many ranks.
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
        self.item_catalog: ItemCatalog | None = None  # the items that can be found, for families that find some
        self.checkpoint_folder: Path | None = None  # the step that it was opened from, where it only reads

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` gives, in memory of its own: `fully_shard` warns of a module that returns a view."""
        return compute().clone()

    def logits(self, inputs: Mapping[str, Any], noise: SampleDropout | None = None) -> Tensor:
        """Logits [B] of the inputs that `inputs_of` makes of samples, for families that score."""
        output: Tensor = self.network(inputs["dense"], self.vectors(inputs), noise)
        return output

    def vectors(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The vectors of all lookups that the inputs ask for."""
        return self.requests.vectors(self.tables(inputs["requests"]), inputs["lengths"])


@final
class ReadOnlyTables(nn.Module):
    """Tables that are only read, by name, looked up as a collection of those that train is."""

    def __init__(self, tables: Mapping[str, nn.Module], features: Mapping[str, str]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        self.features = dict(features)

    def forward(self, requests: Mapping[str, EmbeddingRequest]) -> dict[str, Tensor]:
        """The vectors of every request."""
        return {
            name: self.tables[self.features[name]](*(request if isinstance(request, tuple) else (request,)))
            for name, request in requests.items()
        }


def inputs_of(
    batch: FeatureBatch, plan: EmbeddingRequestPlan, lookups: Collection[str] | None = None
) -> dict[str, Any]:
    """What a network is called with for these samples; of its lookups those that are named, or all."""
    requests = plan.requests(batch, lookups)
    lengths = {name: sequence.lengths for name, sequence in batch.sequences.items()}
    return {"dense": batch.dense, "lengths": lengths, "requests": requests}


def sample_shape(encoder: FeatureEncoder) -> SampleShape:
    """What a network is told about the features of a schema."""
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
    """Which tables a network needs over these features, and how they are called."""
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
    """The tables of a plan, without rows: those come into being when they are first asked for. `spreads` says how each
    is spread over several ranks."""
    tables = {
        name: CachedEmbedding(
            table.num_rows,
            table.dim,
            name=name,
            # What a wide part wants is a sum over all features.
            mode="sum" if table.kind == "wide" else options.pooling,
            optimizer=options.optimizer_of(table.kind),
            seed=seed,
            init_scale=0.0 if table.kind == "wide" else options.init_std,
            sharding=shardings.get(name),
            device=str(world.device),
            device_rows=cache.device_rows,
            host_rows=cache.host_rows,
            path=None if cache.path is None else str(Path(cache.path) / name),
            file_rows=cache.file_rows,
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
def init_weights(network: nn.Module, seed: int) -> None:
    """Fill all parameters with a pure function of (seed, name): matrices with Glorot's normal numbers (2010), biases
    with zeros, norms with ones. A wide part's weights of numbers are zeros, as its weights of ids are."""
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
    """Set the last bias of the module `logit` to the log-odds of the positive labels among the training rows, so that
    no weight has to learn the rate. A half of a row of each label is added, which keeps the log-odds finite."""
    if statistics.positive_rate is None:
        return
    positive = statistics.positive_rate * statistics.num_rows
    *_, bias = (value for name, value in network.get_submodule(logit).named_parameters() if name.endswith("bias"))
    bias.fill_(math.log((positive + 0.5) / (statistics.num_rows - positive + 0.5)))
