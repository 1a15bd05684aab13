"""The area under the ROC curve: exact with its ties, by group, or by a histogram that knows how wrong it can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

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
