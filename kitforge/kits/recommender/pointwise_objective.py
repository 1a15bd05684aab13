"""Click prediction: binary cross-entropy of single rows."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.parallel.world import World
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.metrics import ClickMetrics, all_reduce_click_metrics
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender, inputs_of
from kitforge.kits.recommender.negatives import ClickRows, NegativeSampler
from kitforge.kits.recommender.objective import Objective
from kitforge.kits.recommender.unknown_values import UnknownValues


class PointwiseObjective(Objective[ClickRows]):
    """Binary cross-entropy. With negative sampling, all rows have label 1 and the drawn negatives 0."""

    metric_for_best = "eval/auc"

    def __init__(self, plan: EmbeddingRequestPlan, seed: int, negatives: NegativeSampler | None = None) -> None:
        super().__init__()
        self._plan = plan
        self._seed = seed
        self._negatives = negatives

    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> ClickRows:
        if self._negatives is not None:
            return self._negatives.training_rows(rows, indices, own, step)
        batch = rows.batch(indices[own])
        starts = torch.arange(len(batch) + 1)
        return ClickRows(batch=batch, starts=starts, positions=torch.zeros_like(starts[1:]))

    def micro_batch(self, batch: ClickRows, start: int, stop: int) -> Mapping[str, Any]:
        starts = batch.starts[start : stop + 1]
        first, last = int(starts[0]), int(starts[-1])
        own = batch.batch.narrow(first, last)
        inputs = inputs_of(own, self._plan)
        owners = torch.repeat_interleave(torch.arange(stop - start), starts.diff())
        numbers = {"owners": owners, "positions": batch.positions[first:last]}
        return {**inputs, **numbers, "labels": click_labels(own), "calls": [inputs["requests"]]}

    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
        dropout_key = None
        if model.training:
            samples = micro_batch["samples"][micro_batch["owners"]]
            if self._negatives is not None:
                samples = samples * self._negatives.rows_of_sample + micro_batch["positions"]
            dropout_key = SampleDropout(seed=self._seed, step=micro_batch["step"], samples=samples)
        logits = model(lambda: model.logits(micro_batch, dropout_key))
        labels = copy_to(micro_batch["labels"], logits.device)
        return {"loss": functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")}

    def count(self, micro_batch: MicroBatch) -> int:
        return len(micro_batch["dense"])

    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """loss in nats per sample, auc, normalized_entropy, calibration; grouped_auc with a group column; best_auc of
        the true probabilities for synthetic logs; unknown_share of each feature."""
        is_grouped = rows.encoder.schema.group is not None
        metrics, truth, unknown = ClickMetrics(is_grouped=is_grouped), ClickMetrics(), UnknownValues(rows.encoder)
        for indices in batches:
            result = None if self._negatives is None else self._negatives.evaluation_rows(rows, indices)
            batch = rows.batch(indices) if result is None else result.batch
            unknown.add(batch)
            inputs = inputs_of(batch, self._plan)
            logits = model(lambda inputs=inputs: model.logits(inputs)).double().cpu().numpy()
            groups = None if batch.groups is None else batch.groups.numpy()
            labels = click_labels(batch).numpy()
            metrics.add(logits, labels, groups)
            if (chances := rows.true_probabilities(indices)) is not None:
                truth.add(np.log(chances / (1 - chances)), labels)
        values = all_reduce_click_metrics(metrics, world)
        best = {}
        if rows.is_synthetic:
            best["best_auc"] = all_reduce_click_metrics(truth, world)["auc"]
        return {"loss": values.pop("log_loss"), **values, **best, **unknown.all_reduce(world, self._warned)}


def click_labels(batch: FeatureBatch) -> Tensor:
    """The labels [B]. Raises DataError if the rows have none."""
    if batch.labels is None:
        raise DataError("these rows have no label", expected="a column of 0 and 1", fix="name it in data.schema, label")
    return batch.labels
