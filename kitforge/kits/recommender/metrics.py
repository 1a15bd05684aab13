"""Metrics of recommenders: log loss and AUC of clicks; hit rate, NDCG and MRR of retrieved items.

States of several ranks add up exactly: sums are kept as integers, so the order of the rows does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.foundation.config import check

# Rows whose scores are kept for the exact AUC: 8 bytes each, and 1 for the label.
EXACT_ROWS = 20_000_000
NUM_BINS = 2**20
# Sums are integers in units of 2^-36; rounding changes a row's term by less than 1e-11.
_UNIT = 2.0**36
_CHUNK_ROWS = 65_536
# A chunk of smaller terms cannot overflow int64.
_SMALL = 1024.0
CUTS = (1, 5, 10, 20)
NO_RANK = -1  # of a target among scores that are NaN
# Scores of users with all items that are held at once, in float32 and in float64.
_SCORES_AT_ONCE = 2**24
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAuc:
    """The mean AUC of the groups, weighted by their rows."""

    auc: float  # NaN where no group has both classes
    num_groups: int  # with both classes
    num_skipped: int  # of one class only


def auc(scores: Floats, labels: Floats) -> float:
    """The probability that a positive row scores higher than a negative one; ties count half. NaN for one class."""
    return grouped_auc(scores, labels, np.zeros(len(scores), np.int64)).auc


def grouped_auc(scores: Floats, labels: Floats, groups: NDArray[np.int64]) -> GroupedAuc:
    """Grouped AUC of DIN (Zhou et al., 2018). Groups of one class have no AUC; they are skipped and counted."""
    order = np.lexsort((scores, groups))
    scores, labels, groups = scores[order], labels[order].astype(np.int64), groups[order]
    is_first = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    is_new = is_first | np.append(True, scores[1:] != scores[:-1])[: len(scores)]
    ties = np.flatnonzero(is_new)
    firsts = np.flatnonzero(is_first)
    if len(firsts) == 0:
        return GroupedAuc(auc=float("nan"), num_groups=0, num_skipped=0)
    # Twice the number of ordered pairs: integers, so nothing is rounded.
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
    """The AUC of a histogram over rising scores, and the bound of its error."""
    num_pairs = float(positives.sum()) * float(negatives.sum())
    if num_pairs == 0:
        return float("nan"), float("nan")
    positives, negatives = positives.astype(np.float64), negatives.astype(np.float64)
    within = positives * negatives
    # Pairs within a bin count half; the exact count of each is between 0 and 1.
    right = (positives * (np.cumsum(negatives) - negatives)).sum() + within.sum() / 2
    return float(right / num_pairs), float(within.sum() / 2 / num_pairs)


class ClickMetrics:
    """Metrics of click prediction. The AUC is exact up to `exact_rows` rows; above, scores are counted in 2^20 bins of
    probability and `auc_error` bounds the error."""

    def __init__(self, *, is_grouped: bool = False, exact_rows: int = EXACT_ROWS) -> None:
        self._is_grouped = is_grouped
        self._exact_rows = exact_rows
        self._sums = {"rows": 0, "positives": 0, "predicted": 0, "log_loss": 0, "invalid": 0}
        self._scores: list[Floats] = []
        self._labels: list[NDArray[np.bool_]] = []
        self._groups: list[NDArray[np.int64]] = []
        self._bins: NDArray[np.int64] | None = None  # [2, NUM_BINS]: negatives and positives

    def empty(self) -> ClickMetrics:
        """Metrics of the same kind without any rows."""
        return ClickMetrics(is_grouped=self._is_grouped, exact_rows=self._exact_rows)

    def add(self, logits: Floats, labels: Floats, groups: NDArray[np.int64] | None = None) -> None:
        """Count rows: logits [n], labels [n] of 0 and 1, group keys [n]."""
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
        self._limit_memory()

    def state(self) -> dict[str, Any]:
        """The state as integers and arrays, for `merge` on another rank."""
        return {
            "sums": dict(self._sums),
            "scores": np.concatenate(self._scores or [np.zeros(0)]),
            "labels": np.concatenate(self._labels or [np.zeros(0, bool)]),
            "groups": np.concatenate(self._groups or [np.zeros(0, np.int64)]),
            "bins": self._bins,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the rows of another state."""
        for name, value in state["sums"].items():
            self._sums[name] += value
        if state["bins"] is not None:
            self._limit_memory(has_bins=True)
            assert self._bins is not None
            self._bins += state["bins"]
        elif self._bins is not None:
            _count(self._bins, state["scores"], state["labels"])
        if self._bins is None or self._is_grouped:
            self._scores.append(state["scores"])
            self._labels.append(state["labels"])
            self._groups.append(state["groups"])
        self._limit_memory()

    def result(self) -> dict[str, float]:
        """log_loss in nats, normalized_entropy, calibration (predicted clicks over real ones) and auc by name.

        auc_error: only if the AUC is not exact. grouped_auc and groups_skipped: only with groups. A metric without a
        denominator is NaN; a non-finite logit makes all of them NaN.
        """
        num_rows, num_positive = self._sums["rows"], self._sums["positives"]
        loss = _mean(self._sums["log_loss"], num_rows)
        rate = num_positive / num_rows if num_rows else math.nan
        entropy = sum(-each * math.log(each) for each in (rate, 1 - rate) if each > 0) if num_rows else math.nan
        result = {
            "log_loss": loss,
            "normalized_entropy": loss / entropy if entropy > 0 else math.nan,
            "calibration": _mean(self._sums["predicted"], num_positive),
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

    def _limit_memory(self, *, has_bins: bool = False) -> None:
        """Above `exact_rows` rows, or to merge with bins: count scores in bins instead of keeping them, but for
        groups."""
        if self._bins is None and (has_bins or self._sums["rows"] > self._exact_rows):
            state = self.state()
            self._bins = np.zeros((2, NUM_BINS), np.int64)
            _count(self._bins, state["scores"], state["labels"])
            if not self._is_grouped:
                self._scores, self._labels = [], []


def _probabilities(logits: Floats) -> Floats:
    # exp of a non-positive number never overflows.
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small))


def _units(values: Floats) -> int:
    """The sum of non-negative values in units, exact for values of any size."""
    is_small = values < _SMALL
    small = int(np.rint(values[is_small] * _UNIT).astype(np.int64).sum())
    # Python's integers have no largest one; a float has.
    large = (int(value * _UNIT) if value < 1e290 else int(value) << 36 for value in values[~is_small].tolist())
    return small + sum(large)


def _mean(units: int, count: int) -> float:
    """A sum in units over a count, of integers of any size; NaN without a count."""
    return units / (count * int(_UNIT)) if count else math.nan


def _count(counts: NDArray[np.int64], logits: Floats, is_positive: NDArray[np.bool_]) -> None:
    """Add rows to the counts [2, NUM_BINS] of negatives and positives."""
    bins = np.minimum((_probabilities(logits) * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    np.add.at(counts, (is_positive.astype(np.int64), bins), 1)


def rank_users(
    scores_of: Callable[[slice], Tensor],
    targets: NDArray[np.int64],
    num_items: int,
    seen: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], float]:
    """The ranks of the targets [n], NO_RANK where a score is NaN, and the sum of the cross entropies over all items.

    `scores_of` computes the scores [users, num_items] of a block of users, so memory does not grow with n. Items at
    indices `seen` [n, L] (-1: none) rank last, except the target; the loss is over all items.
    """
    size, total = max(_SCORES_AT_ONCE // max(num_items, 1), 1), 0.0
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(targets), size):
        block = slice(start, min(start + size, len(targets)))
        scores, wanted = scores_of(block).double().cpu(), targets[block]
        total += float((scores.logsumexp(1) - scores[torch.arange(len(wanted)), torch.from_numpy(wanted)]).sum())
        if seen is not None:
            rows, columns = np.nonzero((seen[block] >= 0) & (seen[block] != wanted[:, None]))
            scores[torch.from_numpy(rows), torch.from_numpy(seen[block][rows, columns])] = -torch.inf
        own = target_ranks(scores.numpy(), wanted)
        own[torch.isnan(scores).any(1).numpy()] = NO_RANK
        ranks.append(own)
    return np.concatenate(ranks), total


def target_ranks(scores: Floats, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of other candidates of scores [n, candidates] that rank before the target column [n]. Ties count
    against the target, so constant scores find nothing. Excluded candidates have the score -inf."""
    wanted = np.take_along_axis(scores, targets[:, None], axis=1)
    ranks: NDArray[np.int64] = (scores >= wanted).sum(axis=1) - 1
    return ranks


def ranks_without(
    ranks: NDArray[np.int64], targets: NDArray[np.int64], seen: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """The ranks of the targets [n] in a fixed order of all items (`ranks` [I]), not counting items at indices `seen`
    [n, L] (-1: none) that rank before the target."""
    ranked = ranks[targets]
    if seen is None or not seen.shape[1]:
        return ranked
    excluded = np.sort(seen, axis=1)
    is_first = np.diff(excluded, axis=1, prepend=-1) != 0
    without: NDArray[np.int64] = ranked - (is_first & (ranks[excluded] < ranked[:, None])).sum(axis=1)
    return without


class RankingMetrics:
    """Counts of targets by rank, which add up exactly over ranks."""

    def __init__(self, cuts: Sequence[int] = CUTS) -> None:
        for cut in cuts:
            check(cut >= 1, "cuts", cut, "at least 1")
        self._cuts = tuple(cuts)
        self.counts = np.zeros(0, np.int64)  # [ranks]
        self.num_cold = 0  # targets that training never saw: misses
        self.num_invalid = 0  # targets among scores that are NaN

    def empty(self) -> RankingMetrics:
        """Metrics of the same kind without any rows."""
        return RankingMetrics(self._cuts)

    def add(self, ranks: NDArray[np.int64]) -> None:
        """Count targets by rank [n], 0 for the first."""
        is_valid = ranks != NO_RANK
        self.merge(np.bincount(ranks[is_valid], minlength=1), num_invalid=int((~is_valid).sum()))

    def merge(self, counts: NDArray[np.int64], num_cold: int = 0, num_invalid: int = 0) -> None:
        """Add the counts of another process."""
        self.num_cold += num_cold
        self.num_invalid += num_invalid
        size = max(len(self.counts), len(counts))
        self.counts = np.pad(self.counts, (0, size - len(self.counts))) + np.pad(counts, (0, size - len(counts)))

    def result(self) -> dict[str, float]:
        """hr@k, ndcg@k (one relevant item: 1 / log2(rank + 1) within k), mrr and cold_share; NaN without targets, and
        where a score is NaN."""
        total = int(self.counts.sum()) + self.num_cold
        positions = np.arange(1, len(self.counts) + 1)
        discounts = self.counts / np.log2(positions + 1)
        result = {"mrr": float((self.counts / positions).sum()) / total if total else float("nan")}
        result["cold_share"] = self.num_cold / total if total else float("nan")
        for cut in self._cuts:
            result[f"hr@{cut}"] = float(self.counts[:cut].sum()) / total if total else float("nan")
            result[f"ndcg@{cut}"] = float(discounts[:cut].sum()) / total if total else float("nan")
        return dict.fromkeys(result, math.nan) if self.num_invalid else result


def all_reduce_ranking_metrics(metrics: RankingMetrics, loss: float, world: World) -> dict[str, float]:
    """The metrics over the targets of all ranks, the same on each."""
    merged, total = metrics.empty(), 0.0
    own = (metrics.counts, metrics.num_cold, metrics.num_invalid, loss)
    for counts, num_cold, num_invalid, rank_loss in world.all_gather_object(own):
        merged.merge(counts, num_cold, num_invalid)
        total += rank_loss
    # A target that is not among the items has no loss.
    return {"loss": total / (int(merged.counts.sum()) or math.nan), **merged.result()}


def all_reduce_click_metrics(metrics: ClickMetrics, world: World) -> dict[str, float]:
    """The metrics over the rows of all ranks, the same on each."""
    merged = metrics.empty()
    for state in world.all_gather_object(metrics.state()):
        merged.merge(state)
    return merged.result()
