"""Metrics of recommenders: log loss and AUC of clicks; hit rate, NDCG and MRR of retrieved items.

States of several ranks add up exactly: sums are kept as integers, so the order of the rows does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.foundation.config import check

# Rows whose scores are kept for the exact AUC, 8 bytes each and 1 for the label.
EXACT_ROWS = 20_000_000
NUM_BINS = 2**20
# A sum is counted in units of 2^-36, which rounds a row's share by less than 1e-11.
_UNIT = 2.0**36
_CHUNK_ROWS = 65_536
CUTS = (1, 5, 10, 20)
# Scores that are held at once, in float32 and in float64: of as many users as have so many with all items.
_SCORES_AT_ONCE = 2**24
Floats = NDArray[np.floating[Any]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAuc:
    """The mean of the groups' AUC, each weighted by its rows."""

    auc: float  # NaN where no group has both classes
    num_groups: int  # that count
    num_skipped: int  # of one class only


def auc(scores: Floats, labels: Floats) -> float:
    """The chance that a positive row scores higher than a negative one, ties counted half; NaN for one class only."""
    return grouped_auc(scores, labels, np.zeros(len(scores), np.int64)).auc


def grouped_auc(scores: Floats, labels: Floats, groups: NDArray[np.int64]) -> GroupedAuc:
    """As DIN's authors define it (Zhou et al. 2018): groups of one class have no AUC and are left out, and counted."""
    order = np.lexsort((scores, groups))
    scores, labels, groups = scores[order], labels[order].astype(np.int64), groups[order]
    is_first = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    is_new = is_first | np.append(True, scores[1:] != scores[:-1])[: len(scores)]
    ties = np.flatnonzero(is_new)
    firsts = np.flatnonzero(is_first)
    if len(firsts) == 0:
        return GroupedAuc(auc=float("nan"), num_groups=0, num_skipped=0)
    # Twice the number of pairs that are in order: whole numbers, so nothing is rounded.
    positives = np.add.reduceat(labels, ties)
    negatives = np.diff(np.append(ties, len(labels))) - positives
    group_of = np.searchsorted(firsts, ties, side="right") - 1
    group_positives, group_negatives = (np.bincount(group_of, each, len(firsts)) for each in (positives, negatives))
    below = np.cumsum(negatives) - negatives
    below -= below[np.searchsorted(ties, firsts)][group_of]
    pairs = np.zeros(len(firsts), np.int64)
    np.add.at(pairs, group_of, positives * (2 * below + negatives))
    counts = group_positives * group_negatives > 0
    if not counts.any():
        return GroupedAuc(auc=float("nan"), num_groups=0, num_skipped=len(firsts))
    weights = (group_positives + group_negatives)[counts]
    values = pairs[counts] / (2 * group_positives[counts] * group_negatives[counts])
    mean = float((values * weights).sum() / weights.sum())
    return GroupedAuc(auc=mean, num_groups=int(counts.sum()), num_skipped=int((~counts).sum()))


def histogram_auc(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> tuple[float, float]:
    """The AUC of rows counted by bins of rising score, and how far it can be from the exact one."""
    num_pairs = float(positives.sum()) * float(negatives.sum())
    if num_pairs == 0:
        return float("nan"), float("nan")
    positives, negatives = positives.astype(np.float64), negatives.astype(np.float64)
    within = positives * negatives
    # Pairs within a bin count half; in truth each counts somewhere from nothing to one.
    right = (positives * (np.cumsum(negatives) - negatives)).sum() + within.sum() / 2
    return float(right / num_pairs), float(within.sum() / 2 / num_pairs)


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


def rank_users(
    scores_of: Callable[[slice], Tensor],
    targets: NDArray[np.int64],
    num_items: int,
    seen: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], float]:
    """The ranks of the targets [n], and the sum of the cross entropies over all items. `scores_of` gives the scores
    [users, num_items] of some of the n users; they are asked for in blocks, so that memory does not grow with n. Items
    at places `seen` [n, L] (-1 for none) stand behind all others, but for the target itself; the loss is over all."""
    size, total = max(_SCORES_AT_ONCE // max(num_items, 1), 1), 0.0
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(targets), size):
        block = slice(start, min(start + size, len(targets)))
        scores, wanted = scores_of(block).double().cpu(), targets[block]
        total += float((scores.logsumexp(1) - scores[torch.arange(len(wanted)), torch.from_numpy(wanted)]).sum())
        if seen is not None:
            rows, columns = np.nonzero((seen[block] >= 0) & (seen[block] != wanted[:, None]))
            scores[torch.from_numpy(rows), torch.from_numpy(seen[block][rows, columns])] = -torch.inf
        ranks.append(target_ranks(scores.numpy(), wanted))
    return np.concatenate(ranks), total


def target_ranks(scores: Floats, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many other candidates of scores [n, candidates] stand before the target [n] (a column). A tie is lost:
    who scores everything alike has found nothing. A candidate that is not asked for has the score -inf."""
    wanted = np.take_along_axis(scores, targets[:, None], axis=1)
    ranks: NDArray[np.int64] = (scores >= wanted).sum(axis=1) - 1
    return ranks


def ranks_without(
    ranks: NDArray[np.int64], targets: NDArray[np.int64], seen: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The ranks of the targets [n] in one order of all items, given by the `ranks` [I] of these; without the items at
    places `seen` [n, L] (-1 for none) that stand before the target."""
    ranked = ranks[targets]
    if seen is None or not seen.shape[1]:
        return ranked
    excluded = np.sort(seen, axis=1)
    is_first = np.diff(excluded, axis=1, prepend=-1) != 0
    without: NDArray[np.int64] = ranked - (is_first & (ranks[excluded] < ranked[:, None])).sum(axis=1)
    return without


def build_ranking_metrics(top: int) -> RankingMetrics:
    """Those that are always told, and those of one k."""
    return RankingMetrics(sorted({*CUTS, top}))


@final
class RankingMetrics:
    """Counts of targets by their rank, which add up exactly."""

    def __init__(self, cuts: Sequence[int] = CUTS) -> None:
        for cut in cuts:
            check(cut >= 1, "cuts", cut, "at least 1")
        self._cuts = tuple(cuts)
        self.counts = np.zeros(0, np.int64)  # [ranks]
        self.num_cold = 0  # targets that training has never seen

    def empty(self) -> RankingMetrics:
        """The same, of nothing yet."""
        return RankingMetrics(self._cuts)

    def add(self, ranks: NDArray[np.int64]) -> None:
        """Count targets by rank [n], 0 for the first place."""
        self.merge(np.bincount(ranks, minlength=1))

    def merge(self, counts: NDArray[np.int64], num_cold: int = 0) -> None:
        """Count the targets of another one's counts as well."""
        self.num_cold += num_cold
        size = max(len(self.counts), len(counts))
        self.counts = np.pad(self.counts, (0, size - len(self.counts))) + np.pad(counts, (0, size - len(counts)))

    def result(self) -> dict[str, float]:
        """hr@k, ndcg@k (one wanted item: 1 / log2(place + 1) within k), mrr and the share of targets that are cold, by
        name; NaN without targets."""
        total = int(self.counts.sum()) + self.num_cold
        positions = np.arange(1, len(self.counts) + 1)
        discounts = self.counts / np.log2(positions + 1)
        result = {"mrr": float((self.counts / positions).sum()) / total if total else float("nan")}
        result["cold_share"] = self.num_cold / total if total else float("nan")
        for cut in self._cuts:
            result[f"hr@{cut}"] = float(self.counts[:cut].sum()) / total if total else float("nan")
            result[f"ndcg@{cut}"] = float(discounts[:cut].sum()) / total if total else float("nan")
        return result
