"""Two-tower retrieval with an in-batch softmax.

The negatives are the items of the whole step: every micro-batch and every rank compares its users with the same items,
so the loss does not depend on micro-batches or ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.nn.dropout import SampleDropout
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RecommendationDataOptions, RecommendationOptions
from kitforge.kits.recommender.data import schema_of
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender, inputs_of
from kitforge.kits.recommender.objective import RetrievalObjective
from kitforge.kits.recommender.schema import FeatureSchema, with_own_items, with_rare_values
from kitforge.models.two_tower.model import TwoTowerConfig

# Items per forward pass of the item tower.
ITEM_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCandidates:
    """The samples of a whole step; this rank's users begin at `first`."""

    batch: FeatureBatch
    first: int
    log_frequencies: Tensor  # [B]


class InBatchSoftmax(RetrievalObjective[StepCandidates]):
    """In-batch softmax with the logQ correction for sampling frequency (Yi et al., 2019). Rows with label 0 contribute
    their items as negatives, and no users."""

    exported_part = "user"

    @classmethod
    def default_schema(cls, config: TwoTowerConfig, rows: Any, data: RecommendationDataOptions) -> FeatureSchema:
        """See `Objective`. Every item is to be found, however rare and however many there are."""
        guessed = schema_of(rows, data, is_scored=False, ids={*config.user, *config.item})
        return with_own_items(with_rare_values(guessed), config.item[:1])

    def __init__(
        self, config: TwoTowerConfig, plan: EmbeddingRequestPlan, catalogue: ItemCatalog, options: RecommendationOptions
    ) -> None:
        super().__init__(config, plan, catalogue, options)
        self.item_feature = config.item[0]
        self.user_features = config.user
        histories = {name for each in plan.lookups if each.pooling == "sequence" for name in each.features}
        sequences = [name for name in config.item if name in histories]
        check(not sequences, "model.item", sequences, "features of one value or a bag: an item has no history")
        self._lookups = {
            side: [each.name for each in plan.lookups if config.is_of(side, each)] for side in ("user", "item")
        }
        self.histories = plan.histories_of(self.item_feature, config.user)
        check(
            bool(self.histories) or not self._excludes_seen,
            "retrieval.exclude_seen",
            True,
            f"false: no sequence of model.user holds items that a user has taken, in the table of {self.item_feature}",
            "data.schema.events with `history: NAME` makes one; give it and the item one `table`",
        )

    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> StepCandidates:
        batch = rows.batch(indices)
        return StepCandidates(
            batch=batch, first=own.start, log_frequencies=self._catalogue.log_frequencies(batch.ids[self.item_feature])
        )

    def micro_batch(self, batch: StepCandidates, start: int, stop: int) -> Mapping[str, Any]:
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
            "ids": batch.batch.ids[self.item_feature],
            "log_frequencies": batch.log_frequencies,
        }

    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
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
            return in_batch_loss(self.scores(model, users, items), micro_batch).sum()

        return {"loss": model(compute)}

    def count(self, micro_batch: MicroBatch) -> int:
        return int(micro_batch["weights"].sum())

    def evaluation_queries(self, model: Recommender, batch: FeatureBatch) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """See `RetrievalObjective`. Rows without a click are no queries."""
        users = model(lambda: self.user_vectors(model, batch))
        wants = np.ones(len(batch), bool) if batch.labels is None else batch.labels.numpy() > 0
        return users, batch.ids[self.item_feature], wants

    def scores(self, model: Recommender, users: Tensor, items: Tensor) -> Tensor:
        network: Any = model.network
        scores: Tensor = network.scores(users, items)
        return scores

    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        return side_vectors(model, "user", inputs_of(batch, self._plan, self._lookups["user"]), None)

    def item_vectors(self, model: Recommender) -> Tensor:
        samples, vectors = self._catalogue.samples, []
        assert samples is not None
        for start in range(0, len(self._catalogue), ITEM_BATCH):
            batch = samples.narrow(start, min(start + ITEM_BATCH, len(samples)))
            vectors.append(side_vectors(model, "item", inputs_of(batch, self._plan, self._lookups["item"]), None))
        return torch.cat(vectors)


def side_vectors(model: Recommender, side: str, inputs: Mapping[str, Any], dropout_key: SampleDropout | None) -> Tensor:
    """User or item vectors [B, dim] of samples."""
    tower = getattr(model.network, side)
    vectors: Tensor = tower(model.dense(inputs), model.vectors(inputs), dropout_key)
    return vectors


def in_batch_loss(scores: Tensor, micro_batch: Mapping[str, Any]) -> Tensor:
    """The loss [b] of scores [b, B] of users with the items of the whole batch. Accidental hits, other rows with the
    user's own item, are masked out."""
    targets, ids = (copy_to(micro_batch[name], scores.device) for name in ("targets", "ids"))
    corrected = scores - copy_to(micro_batch["log_frequencies"], scores.device).to(scores.dtype)
    is_same = ids[targets].unsqueeze(1) == ids
    is_same[torch.arange(len(targets), device=scores.device), targets] = False
    corrected = corrected.masked_fill(is_same, -math.inf)
    losses = torch.nn.functional.cross_entropy(corrected, targets, reduction="none")
    weighted: Tensor = losses * copy_to(micro_batch["weights"], scores.device)
    return weighted
