"""What a family is trained for and measured by. The task owns order, shares and steps; an objective owns the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.model import Recommender

Batch = TypeVar("Batch")


class Objective(ABC, Generic[Batch]):
    """A loss that is a sum over samples, and metrics that do not depend on how rows are batched."""

    metric_for_best: str  # the metric whose largest value is the best

    @abstractmethod
    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> Batch:
        """The samples of a step that are this rank's: those at the places `own` of `indices`."""

    @abstractmethod
    def micro_batch(self, batch: Batch, start: int, stop: int) -> Mapping[str, Any]:
        """Samples start .. stop - 1 of a batch as a micro-batch. `calls` are the requests of its forward passes."""

    @abstractmethod
    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
        """Sums over the micro-batch, "loss" among them."""

    @abstractmethod
    def count(self, micro_batch: MicroBatch) -> int:
        """How many losses the sum is of."""

    @abstractmethod
    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """Metrics by name over this rank's batches of rows and those of all others, "loss" among them."""


class RetrievalObjective(Objective[Batch]):
    """An objective of a family that finds items: vectors of users and items whose products say what goes together."""

    item_feature: str  # whose values are the items
    user_features: tuple[str, ...]  # what a user's vector is made of
    histories: tuple[str, ...]  # sequences of items that a user has taken

    @abstractmethod
    def item_vectors(self, model: Recommender) -> Tensor:
        """The vectors [I, dim] of the catalogue's items, in its order."""

    @abstractmethod
    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        """The vectors [B, dim] of the users of a batch."""
