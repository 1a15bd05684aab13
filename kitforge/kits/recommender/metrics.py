"""How well clicks are predicted: in a stream, and the same on any number of ranks, whose states are added up.

The sums are kept as whole numbers, so they do not depend on the order in which rows are seen.
"""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kitforge.kits.recommender.auc import Floats, auc, grouped_auc, histogram_auc

# Rows whose scores are kept for the exact AUC, 8 bytes each and 1 for the label.
EXACT_ROWS = 20_000_000
NUM_BINS = 2**20
# A sum is counted in units of 2^-36, which rounds a row's share by less than 1e-11.
_UNIT = 2.0**36
_CHUNK_ROWS = 65_536


@final
class ClickMetrics:
    """Metrics of predicted clicks. Up to `exact_rows` rows the AUC is exact; beyond, of scores put into 2^20 bins by
    their probability, with the bound of its error beside it."""

    def __init__(self, *, is_grouped: bool = False, exact_rows: int = EXACT_ROWS) -> None:
        self._is_grouped = is_grouped
        self._exact_rows = exact_rows
        self._sums = {"rows": 0, "positives": 0, "predicted": 0, "log_loss": 0, "invalid": 0}
        self._scores: list[Floats] = []
        self._labels: list[NDArray[np.bool_]] = []
        self._groups: list[NDArray[np.int64]] = []
        self._bins: NDArray[np.int64] | None = None  # [2, NUM_BINS]: negatives and positives

    def empty(self) -> ClickMetrics:
        """The same, of nothing yet."""
        return ClickMetrics(is_grouped=self._is_grouped, exact_rows=self._exact_rows)

    def add(self, logits: Floats, labels: Floats, groups: NDArray[np.int64] | None = None) -> None:
        """Count rows: log odds [n] as the model gives them, labels [n] of 0 and 1, group keys [n]."""
        if len(logits) != len(labels) or (self._is_grouped and groups is None):
            raise ValueError("a logit, a label and, where groups were asked for, a group for each row")
        logits = logits.astype(np.float64)
        is_positive = labels > 0.5
        self._sums["invalid"] += int((~np.isfinite(logits)).sum())
        logits = np.where(np.isfinite(logits), logits, 0.0)
        for start in range(0, len(logits), _CHUNK_ROWS):
            self._sum(logits[start : start + _CHUNK_ROWS], is_positive[start : start + _CHUNK_ROWS])
        if self._bins is not None:
            _count(self._bins, logits, is_positive)
        if self._bins is None or self._is_grouped:
            self._scores.append(logits)
            self._labels.append(is_positive)
        if groups is not None and self._is_grouped:
            self._groups.append(groups.astype(np.int64))
        self._bound()

    def state(self) -> dict[str, Any]:
        """Whole numbers and arrays, for `merge` of another rank's metrics."""
        return {
            "sums": dict(self._sums),
            "scores": np.concatenate(self._scores or [np.zeros(0)]),
            "labels": np.concatenate(self._labels or [np.zeros(0, bool)]),
            "groups": np.concatenate(self._groups or [np.zeros(0, np.int64)]),
            "bins": self._bins,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Count the rows of another one's state as well."""
        for name, value in state["sums"].items():
            self._sums[name] += value
        if state["bins"] is not None:
            self._begin_bins()
            assert self._bins is not None
            self._bins += state["bins"]
        elif self._bins is not None:
            _count(self._bins, state["scores"], state["labels"])
        if self._bins is None or self._is_grouped:
            self._scores.append(state["scores"])
            self._labels.append(state["labels"])
            self._groups.append(state["groups"])
        self._bound()

    def result(self) -> dict[str, float]:
        """log_loss in nats, normalized_entropy, calibration (predicted clicks over real ones) and auc by name.

        auc_error is there where the AUC is not exact; grouped_auc and groups_skipped where groups were asked for. NaN
        is what has nothing to divide by, and all of them when a logit was not finite.
        """
        sums = {name: value / _UNIT for name, value in self._sums.items() if name in ("predicted", "log_loss")}
        num_rows, num_positive = self._sums["rows"], self._sums["positives"]
        loss = sums["log_loss"] / num_rows if num_rows else math.nan
        entropy = _entropy(num_positive / num_rows) if num_rows else math.nan
        result = {
            "log_loss": loss,
            "normalized_entropy": loss / entropy if entropy > 0 else math.nan,
            "calibration": sums["predicted"] / num_positive if num_positive else math.nan,
        }
        state = self.state()
        if self._bins is None:
            result["auc"] = auc(state["scores"], state["labels"])
        else:
            result["auc"], result["auc_error"] = histogram_auc(self._bins[1], self._bins[0])
        if self._is_grouped:
            grouped = grouped_auc(state["scores"], state["labels"], state["groups"])
            result |= {"grouped_auc": grouped.auc, "groups_skipped": float(grouped.num_skipped)}
        return dict.fromkeys(result, math.nan) if self._sums["invalid"] else result

    def _sum(self, logits: Floats, is_positive: NDArray[np.bool_]) -> None:
        self._sums["rows"] += len(logits)
        self._sums["positives"] += int(is_positive.sum())
        self._sums["predicted"] += _units(_probabilities(logits))
        # log(1 + exp(-z)) of a positive and log(1 + exp(z)) of a negative row, without overflow.
        self._sums["log_loss"] += _units(np.logaddexp(0, np.where(is_positive, -logits, logits)))

    def _bound(self) -> None:
        if self._bins is None and self._sums["rows"] > self._exact_rows:
            self._begin_bins()

    def _begin_bins(self) -> None:
        """From now on scores are counted instead of kept, but for the groups."""
        if self._bins is None:
            state = self.state()
            self._bins = np.zeros((2, NUM_BINS), np.int64)
            _count(self._bins, state["scores"], state["labels"])
            if not self._is_grouped:
                self._scores, self._labels = [], []


def _probabilities(logits: Floats) -> Floats:
    # exp of what is not positive never overflows.
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small))


def _units(values: Floats) -> int:
    return int(np.rint(values * _UNIT).astype(np.int64).sum())


def _count(counts: NDArray[np.int64], logits: Floats, is_positive: NDArray[np.bool_]) -> None:
    """Add rows to the counts [2, NUM_BINS] of negatives and positives."""
    bins = np.minimum((_probabilities(logits) * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    np.add.at(counts, (is_positive.astype(np.int64), bins), 1)


def _entropy(rate: float) -> float:
    return sum(-probability * math.log(probability) for probability in (rate, 1 - rate) if probability > 0)
