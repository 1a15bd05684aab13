"""Matching by two towers: of all items of a batch, which one did the user take?

The batch is that of the whole step, however it is split: every micro-batch and every rank compares its users with the
same items, so that k micro-batches are one batch and N ranks are one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.parallel.world import World
from kitforge.foundation.config import check
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RetrievalOptions
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.metrics import RankingMetrics, build_ranking_metrics, rank_users, ranks_without
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender, inputs_of
from kitforge.kits.recommender.objective import RetrievalObjective
from kitforge.models.two_tower.model import TwoTower, TwoTowerConfig

# Items whose vectors are made at once.
ITEM_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidates:
    """The samples of a whole step, and which of them are this rank's users."""

    batch: FeatureBatch
    first: int
    log_frequencies: Tensor  # [B]


@final
class InBatchSoftmax(RetrievalObjective[StepCandidates]):
    """Softmax over the items of the batch, corrected by how often each is sampled (Yi et al., 2019). Rows whose label
    is 0 are items, and no users."""

    def __init__(
        self,
        config: TwoTowerConfig,
        plan: EmbeddingRequestPlan,
        catalogue: ItemCatalog,
        retrieval: RetrievalOptions,
        seed: int,
    ) -> None:
        self._item = self.item_feature = config.item[0]
        self.user_features = config.user
        sequences = [name for name in config.item if any(name in each.features for each in plan.sequences())]
        check(not sequences, "model.item", sequences, "features of one value or a bag: an item has no history")
        sides = {side: set(getattr(config, side)) | {side} for side in ("user", "item")}
        self._lookups = {
            side: [lookup.name for lookup in plan.lookups if lookup.name in names] for side, names in sides.items()
        }
        self.histories = plan.histories_of(self._item, config.user)
        check(
            bool(self.histories) or not retrieval.exclude_seen,
            "retrieval.exclude_seen",
            True,
            f"false: no sequence of model.user holds items that a user has taken, in the table of {self._item}",
            "data.schema.events with `history: NAME` makes one; give it and the item one `table`",
        )
        self._plan = plan
        self._catalogue = catalogue
        self._seed = seed
        self._top = retrieval.top_k
        self._excludes_seen = retrieval.exclude_seen
        self.metric_for_best = f"eval/hr@{self._top}"

    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> StepCandidates:
        """See `Objective`."""
        batch = rows.batch(indices)
        return StepCandidates(
            batch=batch, first=own.start, log_frequencies=self._catalogue.log_frequencies(batch.ids[self._item])
        )

    def micro_batch(self, batch: StepCandidates, start: int, stop: int) -> Mapping[str, Any]:
        """See `Objective`."""
        first, last = batch.first + start, batch.first + stop
        own = batch.batch.narrow(first, last)
        users = inputs_of(own, self._plan, self._lookups["user"])
        items = inputs_of(batch.batch, self._plan, self._lookups["item"])
        return {
            "users": users,
            "items": items,
            "calls": [users["requests"], items["requests"]],
            "weights": torch.ones(len(own)) if own.labels is None else own.labels,
            "targets": torch.arange(first, last),
            "ids": batch.batch.ids[self._item],
            "log_frequencies": batch.log_frequencies,
        }

    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
        """See `Objective`."""
        noises: dict[str, SampleDropout | None] = {"users": None, "items": None}
        if model.training:
            step, targets = micro_batch["step"], micro_batch["targets"]
            positions = torch.arange(len(micro_batch["ids"]))
            noises = {
                "users": SampleDropout(seed=self._seed, step=step, samples=targets),
                "items": SampleDropout(seed=self._seed, step=step, samples=positions),
            }

        def compute() -> Tensor:
            users = side_vectors(model, "user", micro_batch["users"], noises["users"])
            items = side_vectors(model, "item", micro_batch["items"], noises["items"])
            scores = network_of(model).scores(users, items)
            return in_batch_loss(scores, micro_batch).sum()

        return {"loss": model(compute)}

    def count(self, micro_batch: MicroBatch) -> int:
        """See `Objective`."""
        return int(micro_batch["weights"].sum())

    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """hr@k, ndcg@k and mrr of the item among all items of the training rows, the share of items that are not among
        them (misses all), popularity's hr@k, and the loss over the others."""
        items = model(lambda: self.item_vectors(model))
        metrics, popular, total = build_ranking_metrics(self._top), build_ranking_metrics(self._top), 0.0
        popularity = self._catalogue.popularity_ranks()
        for indices in batches:
            batch = rows.batch(indices)
            users = model(lambda batch=batch: self.user_vectors(model, batch))
            item_indices = self._catalogue.indices_of(batch.ids[self._item])
            # A row without a click looks for no item; one that was never seen in training cannot be found.
            wants = np.ones(len(batch), bool) if batch.labels is None else batch.labels.numpy() > 0
            asks = wants & (item_indices >= 0)
            asking, targets = users[torch.from_numpy(asks)], item_indices[asks]
            scores_of = partial(_block_scores, network_of(model), asking, items)
            seen = None
            if self._excludes_seen:
                seen = self._catalogue.history_indices(batch, self.histories)[asks]
            ranks, loss = rank_users(scores_of, targets, len(items), seen)
            total += loss
            for counted, counted_ranks in ((metrics, ranks), (popular, ranks_without(popularity, targets, seen))):
                counted.add(counted_ranks)
                counted.num_cold += int((wants & (item_indices < 0)).sum())
        baseline = {f"popularity_hr@{self._top}": all_reduce_ranking_metrics(popular, 0.0, world)[f"hr@{self._top}"]}
        return all_reduce_ranking_metrics(metrics, total, world) | baseline

    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        """See `RetrievalObjective`."""
        return side_vectors(model, "user", inputs_of(batch, self._plan, self._lookups["user"]), None)

    def item_vectors(self, model: Recommender) -> Tensor:
        """See `RetrievalObjective`."""
        samples, vectors = self._catalogue.samples, []
        assert samples is not None
        for start in range(0, len(self._catalogue), ITEM_BATCH):
            batch = samples.narrow(start, min(start + ITEM_BATCH, len(samples)))
            vectors.append(side_vectors(model, "item", inputs_of(batch, self._plan, self._lookups["item"]), None))
        return torch.cat(vectors)


def _block_scores(network: TwoTower, users: Tensor, items: Tensor, block: slice) -> Tensor:
    return network.scores(users[block], items)


def network_of(model: Recommender) -> TwoTower:
    """The towers of a model that has two."""
    network = model.network
    assert isinstance(network, TwoTower)
    return network


def side_vectors(model: Recommender, side: str, inputs: Mapping[str, Any], noise: SampleDropout | None) -> Tensor:
    """The vectors [B, dim] of the users or of the items of samples."""
    tower = getattr(model.network, side)
    vectors: Tensor = tower(inputs["dense"], model.vectors(inputs), noise)
    return vectors


def in_batch_loss(scores: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
    """The loss [b] of scores [b, B] of users with the items of the whole batch. An item that happens to be the user's
    own in another row is no wrong answer."""
    targets, ids = micro_batch["targets"].to(scores.device), micro_batch["ids"].to(scores.device)
    corrected = scores - micro_batch["log_frequencies"].to(scores.device, scores.dtype)
    is_same = ids[targets].unsqueeze(1) == ids
    is_same[torch.arange(len(targets)), targets] = False
    corrected = corrected.masked_fill(is_same, -math.inf)
    losses = torch.nn.functional.cross_entropy(corrected, targets, reduction="none")
    weighted: Tensor = losses * micro_batch["weights"].to(scores.device)
    return weighted


def all_reduce_ranking_metrics(metrics: RankingMetrics, loss: float, world: World) -> dict[str, float]:
    """The metrics of all ranks' rows, the same on each."""
    merged, total = metrics.empty(), 0.0
    for counts, num_cold, rank_loss in world.all_gather_object((metrics.counts, metrics.num_cold, loss)):
        merged.merge(counts, num_cold)
        total += rank_loss
    return {"loss": total / max(int(merged.counts.sum()), 1), **merged.result()}
