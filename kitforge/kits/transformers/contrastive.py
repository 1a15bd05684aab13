"""Contrastive learning of text embeddings with in-batch negatives, and the metrics of retrieval by them.

Q queries, C candidates, D dim of a vector.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

# Metrics of the first so many candidates.
CUTS = (1, 10)
# Queries that are compared with all candidates at once.
_QUERIES = 512


class TextGroups:
    """Rows of texts: an anchor, its positive, and any number of negatives. A text is a number; equal texts have the
    same."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.counts = np.array([len(row) for row in rows], np.int64)
        self.texts = np.array([text for row in rows for text in row], np.int64)
        # The index of each row's anchor in `texts`; its positive follows it.
        self.starts = np.cumsum(self.counts) - self.counts
        self._positives: dict[int, set[int]] = {}
        for row in rows:
            self._positives.setdefault(row[0], set()).add(row[1])

    def slots(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices in `texts` of all texts of these rows."""
        return spans(self.starts[rows], self.counts[rows])

    def positives(self, anchor: int) -> set[int]:
        """The positives of an anchor in any row."""
        return self._positives[anchor]

    def false_negatives(self, rows: NDArray[np.int64], candidates: NDArray[np.int64]) -> Tensor:
        """The candidates that are left out of the negatives of a row [rows, C]: the text of the anchor, and the
        anchor's positives in any row."""
        columns: dict[int, list[int]] = {}
        for column, text in enumerate(candidates.tolist()):
            columns.setdefault(text, []).append(column)
        found = torch.zeros(len(rows), len(candidates), dtype=torch.bool)
        for index, anchor in enumerate(self.texts[self.starts[rows]].tolist()):
            found[index, [each for text in (anchor, *self._positives[anchor]) for each in columns.get(text, [])]] = True
        return found


def spans(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of all spans of these starts and lengths, one span after another."""
    parts = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def contrastive_losses(
    queries: Tensor, candidates: Tensor, wanted: Tensor, excluded: Tensor, temperature: float, sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """InfoNCE (van den Oord et al., 2018) with the other texts of a batch as negatives (Henderson et al., 2017): the
    cross entropy [Q] of each query's candidate `wanted` [Q] by cosines over the temperature; candidates of `excluded`
    [Q, C] are left out. A mean over the first `sizes` numbers of the vectors [Q, D] and [C, D] (Matryoshka, Kusupati et
    al., 2022). And whether the wanted candidate is the nearest by the whole vectors [Q]."""
    excluded = excluded.scatter(1, wanted.unsqueeze(1), False)
    losses, logits = queries.new_zeros(len(queries)), queries.new_zeros(0)
    # Half precision has not the digits of a cosine over 0.05.
    with torch.autocast(queries.device.type, enabled=False):
        for size in sizes:
            one, other = (functional.normalize(each[:, :size], dim=-1) for each in (queries, candidates))
            logits = ((one @ other.t()) / temperature).masked_fill(excluded, -torch.inf)
            losses = losses + functional.cross_entropy(logits, wanted, reduction="none") / len(sizes)
    return losses, logits.detach().argmax(-1) == wanted


def retrieval_metrics(
    vectors: Tensor, groups: TextGroups, rows: NDArray[np.int64], temperature: float, sizes: Sequence[int]
) -> dict[str, float]:
    """Of vectors [texts, D] of the texts of `groups`, over the distinct positives and negatives of `rows`: the mean
    `loss` of the rows, and of their distinct anchors by cosine `recall@k`, the part of an anchor's positives that is
    among the first k, `mrr@10`, and `ndcg@10` with relevance 0 or 1 (Jarvelin and Kekalainen, 2002); of the smaller
    sizes with a suffix. Nothing depends on how the rows were split into batches."""
    slots = groups.slots(rows)
    slots = slots[~np.isin(slots, groups.starts)]
    corpus, first = np.unique(groups.texts[slots], return_index=True)
    candidates, starts, found = vectors[torch.from_numpy(slots[first])], groups.starts[rows], {"loss": 0.0}
    for start in range(0, len(rows), _QUERIES):
        part, anchors = rows[start : start + _QUERIES], starts[start : start + _QUERIES]
        own = torch.from_numpy(np.searchsorted(corpus, groups.texts[anchors + 1]))
        excluded, queries = groups.false_negatives(part, corpus), vectors[torch.from_numpy(anchors)]
        losses, _ = contrastive_losses(queries, candidates, own, excluded, temperature, sizes)
        found["loss"] += float(losses.sum()) / len(rows)
    distinct = starts[np.unique(groups.texts[starts], return_index=True)[1]]
    for size in sizes:
        suffix = "" if size == vectors.shape[1] else f"/{size}"
        queries = vectors[torch.from_numpy(distinct), :size]
        ranked = _ranked(queries, candidates[:, :size], groups.texts[distinct], corpus, groups.positives)
        found |= {f"{name}{suffix}": value for name, value in ranked.items()}
    return found


def _ranked(
    queries: Tensor,
    candidates: Tensor,
    anchors: NDArray[np.int64],
    corpus: NDArray[np.int64],
    positives: Callable[[int], set[int]],
) -> dict[str, float]:
    """The metrics of anchors [Q] with vectors [Q, D] by their nearest candidates, which are the texts `corpus` [C]."""
    deepest, known = min(max(CUTS), len(corpus)), set(corpus.tolist())
    discounts = 1.0 / torch.arange(2, deepest + 2, dtype=torch.float64).log2()
    sums = dict.fromkeys([*(f"recall@{cut}" for cut in CUTS), "mrr@10", "ndcg@10"], 0.0)
    normal = functional.normalize(candidates, dim=-1).t()
    for start in range(0, len(anchors), _QUERIES):
        part = anchors[start : start + _QUERIES]
        scores = functional.normalize(queries[start : start + _QUERIES], dim=-1) @ normal
        # A text that is an anchor and a candidate does not find itself.
        scores[torch.from_numpy(part[:, None] == corpus[None, :])] = -torch.inf
        nearest = scores.sort(dim=1, descending=True, stable=True).indices[:, :deepest]
        for anchor, found in zip(part.tolist(), corpus[nearest.numpy()].tolist(), strict=True):
            wanted = positives(anchor) & known
            hits = torch.tensor([text in wanted for text in found], dtype=torch.float64)
            for cut in CUTS:
                sums[f"recall@{cut}"] += float(hits[:cut].sum()) / len(wanted)
            sums["mrr@10"] += float((hits / torch.arange(1, deepest + 1)).max())
            sums["ndcg@10"] += float((hits * discounts).sum() / discounts[: len(wanted)].sum())
    return {name: total / len(anchors) for name, total in sums.items()}
