"""Training objectives: the loss of a family and its evaluation metrics. The task owns data order and steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RecommendationDataOptions, RecommendationOptions
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.metrics import (
    CUTS,
    RankingMetrics,
    all_reduce_ranking_metrics,
    rank_users,
    ranks_without,
)
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender
from kitforge.kits.recommender.schema import FeatureSchema
from kitforge.kits.recommender.unknown_values import UnknownValues

Batch = TypeVar("Batch")


class Objective(ABC, Generic[Batch]):
    """A loss summed over samples, and metrics that do not depend on the batch size."""

    metric_for_best: str  # higher is better
    num_held_out: ClassVar[int] = 0  # last items of each history that are evaluated and never trained on
    is_scored: ClassVar[bool] = True  # rows get a probability
    # The part of the network that is exported, "" for all of it, which gives logits; None: the network is not exported.
    exported_part: ClassVar[str | None] = ""

    @classmethod
    def default_schema(cls, config: Any, rows: Any, data: RecommendationDataOptions) -> FeatureSchema | None:
        """The schema of training rows that come without one, for networks of that configuration; None: the usual."""

    def __init__(self) -> None:
        self._warned = set[str]()  # features that a warning about unknown values has named

    @abstractmethod
    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> Batch:
        """This rank's samples of a step: `indices[own]`."""

    @abstractmethod
    def micro_batch(self, batch: Batch, start: int, stop: int) -> Mapping[str, Any]:
        """Samples start .. stop - 1 of a batch as a micro-batch. `calls` holds its embedding requests in order."""

    @abstractmethod
    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
        """Sums over the micro-batch, "loss" among them."""

    @abstractmethod
    def count(self, micro_batch: MicroBatch) -> int:
        """The number of losses in the sum: the denominator of the mean."""

    @abstractmethod
    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """Metrics by name over the evaluation batches of all ranks, "loss" among them."""


class RetrievalObjective(Objective[Batch]):
    """Objective of a retrieval family: user and item vectors, compared by inner product."""

    item_feature: str  # the feature whose values are the items
    user_features: tuple[str, ...]  # inputs of the user vectors
    histories: tuple[str, ...]  # sequences of items that a user has taken

    def __init__(
        self, config: Any, plan: EmbeddingRequestPlan, catalogue: ItemCatalog, options: RecommendationOptions
    ) -> None:
        super().__init__()
        self._plan = plan
        self._catalogue = catalogue
        self._excludes_seen = options.retrieval.exclude_seen
        self._top = options.retrieval.top_k
        self._seed = options.seed
        self.metric_for_best = f"eval/hr@{self._top}"

    @abstractmethod
    def item_vectors(self, model: Recommender) -> Tensor:
        """Vectors [I, dim] of all items, in the order of the catalogue."""

    @abstractmethod
    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        """Vectors [B, dim] of the users of a batch."""

    @abstractmethod
    def evaluation_queries(self, model: Recommender, batch: FeatureBatch) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """User vectors [B, dim], ids [B] of the items to retrieve, and which rows have one [B]."""

    @abstractmethod
    def scores(self, model: Recommender, users: Tensor, items: Tensor) -> Tensor:
        """Scores [n, I] of user vectors [n, dim] with item vectors [I, dim]."""

    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """hr@k, ndcg@k and mrr of the wanted item among all items of the training rows; cold_share, the share of wanted
        items that training never saw (misses); the hr@k of a popularity ranking; the loss over the other items;
        unknown_share of each feature."""
        items = model(lambda: self.item_vectors(model))
        cuts = sorted({*CUTS, self._top})
        metrics, popular, total = RankingMetrics(cuts), RankingMetrics(cuts), 0.0
        popularity, unknown = self._catalogue.popularity_ranks(), UnknownValues(rows.encoder)
        for indices in batches:
            batch = rows.batch(indices)
            unknown.add(batch)
            users, wanted, wants = self.evaluation_queries(model, batch)
            item_indices = self._catalogue.indices_of(wanted)
            asks = wants & (item_indices >= 0)
            asking, targets = users[torch.from_numpy(asks)], item_indices[asks]
            seen = None
            if self._excludes_seen:
                seen = self._catalogue.history_indices(batch, self.histories, self.num_held_out)[asks]
            scores = partial(lambda users, block: self.scores(model, users[block], items), asking)
            ranks, loss = rank_users(scores, targets, len(items), seen)
            total += loss
            for counted, counted_ranks in ((metrics, ranks), (popular, ranks_without(popularity, targets, seen))):
                counted.add(counted_ranks)
                counted.num_cold += int((wants & (item_indices < 0)).sum())
        baseline = {f"popularity_hr@{self._top}": all_reduce_ranking_metrics(popular, 0.0, world)[f"hr@{self._top}"]}
        values = all_reduce_ranking_metrics(metrics, total, world)
        return values | baseline | unknown.all_reduce(world, self._warned)
