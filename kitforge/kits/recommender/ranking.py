"""How high the wanted item stands among all: hit rate, NDCG and mean reciprocal rank, the same on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.config import check
from kitforge.kits.recommender.auc import Floats

CUTS = (1, 5, 10, 20)


def target_ranks(scores: Floats, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many other candidates of scores [n, candidates] stand before the target [n] (a column). A tie is lost:
    who scores everything alike has found nothing. A candidate that is not asked for has the score -inf."""
    wanted = np.take_along_axis(scores, targets[:, None], axis=1)
    ranks: NDArray[np.int64] = (scores >= wanted).sum(axis=1) - 1
    return ranks


def ranking_metrics(top: int) -> RankingMetrics:
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

    def empty(self) -> RankingMetrics:
        """The same, of nothing yet."""
        return RankingMetrics(self._cuts)

    def add(self, ranks: NDArray[np.int64]) -> None:
        """Count targets by rank [n], 0 for the first place."""
        self.merge(np.bincount(ranks, minlength=1))

    def merge(self, counts: NDArray[np.int64]) -> None:
        """Count the targets of another one's counts as well."""
        size = max(len(self.counts), len(counts))
        self.counts = np.pad(self.counts, (0, size - len(self.counts))) + np.pad(counts, (0, size - len(counts)))

    def result(self) -> dict[str, float]:
        """hr@k, ndcg@k (one wanted item: 1 / log2(place + 1) within k) and mrr by name; NaN without targets."""
        total = int(self.counts.sum())
        places = np.arange(1, len(self.counts) + 1)
        gains = self.counts / np.log2(places + 1)
        found = {"mrr": float((self.counts / places).sum()) / total if total else float("nan")}
        for cut in self._cuts:
            found[f"hr@{cut}"] = float(self.counts[:cut].sum()) / total if total else float("nan")
            found[f"ndcg@{cut}"] = float(gains[:cut].sum()) / total if total else float("nan")
        return found
