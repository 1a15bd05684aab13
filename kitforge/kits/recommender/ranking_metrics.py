"""How high the wanted item stands among all: hit rate, NDCG and mean reciprocal rank, the same on any ranks.

A wanted item that was never seen in training stands nowhere: it is a miss, and counted as cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.foundation.config import check
from kitforge.kits.recommender.auc import Floats

CUTS = (1, 5, 10, 20)
# Scores that are held at once, in float32 and in float64: of as many users as have so many with all items.
_SCORES_AT_ONCE = 2**24


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
