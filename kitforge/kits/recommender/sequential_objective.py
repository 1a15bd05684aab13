"""The next item of a sequence, out of items drawn for the step: the same for all its samples, however it is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kitforge.core.nn.context import DropoutKey
from kitforge.core.parallel.world import World
from kitforge.data.splitmix64 import hash_array
from kitforge.foundation import seed as seeds
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch, IdSequence
from kitforge.kits.recommender.config import RetrievalOptions
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.metrics import build_ranking_metrics, rank_users, ranks_without
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender, pad_sequences
from kitforge.kits.recommender.objective import RetrievalObjective
from kitforge.kits.recommender.two_tower_objective import ITEM_BATCH, all_reduce_ranking_metrics
from kitforge.models.sasrec.model import SASRec

LOOKUP = "items"
# The numbers of samples fill the bits below that of a window, so that each has dropout of its own.
_WINDOW_BITS = 40
# The last item of every sequence is never trained on: evaluation asks for it.
NUM_HELD_OUT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """The sequences of a rank's share of a step, cut into windows that the network can read, and the items that all of
    the step are told apart from. Sample i has the windows starts[i] .. starts[i + 1] - 1."""

    windows: IdSequence
    starts: Tensor  # int64 [B + 1]
    positions: Tensor  # int64 [windows]: which of its sample's windows each is
    negatives: Tensor  # int64 [K]


@final
class SampledSoftmax(RetrievalObjective[SequenceBatch]):
    """Softmax over the next item and K that are drawn, which stand for all others (Jean et al., 2015)."""

    def __init__(
        self,
        feature: str,
        window: int,
        plan: EmbeddingRequestPlan,
        catalogue: ItemCatalog,
        retrieval: RetrievalOptions,
        seed: int,
    ) -> None:
        self._feature = self.item_feature = feature
        self._window = window
        self.user_features = self.histories = (feature,)
        self._plan = plan
        self._catalogue = catalogue
        self._num_negatives = min(retrieval.num_negatives, len(catalogue))
        self._seed = seed
        self._top = retrieval.top_k
        self._excludes_seen = retrieval.exclude_seen
        self.metric_for_best = f"eval/hr@{self._top}"

    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> SequenceBatch:
        """See `Objective`."""
        generator = seeds.generator(self._seed, "negatives", step)
        drawn = torch.randint(len(self._catalogue), (self._num_negatives,), generator=generator).numpy()
        sequences = rows.batch(indices[own]).sequences[self._feature]
        # Other cuts at each step, so that no item has always the shortest history.
        numbers = np.arange(own.start, own.start + len(sequences.lengths)).astype(np.uint64)
        cuts = hash_array(numbers, seeds.key(self._seed, "windows", step)) % np.uint64(self._window)
        windows, owners = cut(sequences, self._window, cuts.astype(np.int64))
        starts = torch.searchsorted(owners, torch.arange(len(sequences.lengths) + 1))
        positions = torch.arange(len(owners)) - starts[owners]
        negatives = torch.from_numpy(self._catalogue.ids[drawn])
        return SequenceBatch(windows=windows, starts=starts, positions=positions, negatives=negatives)

    def micro_batch(self, batch: SequenceBatch, start: int, stop: int) -> Mapping[str, Any]:
        """See `Objective`."""
        starts = batch.starts[start : stop + 1]
        first, last = int(starts[0]), int(starts[-1])
        ids, lengths = batch.windows.ids[first:last], batch.windows.lengths[first:last]
        items, negatives = self._request(ids, lengths), self._ids_request(batch.negatives)
        return {
            "owners": torch.repeat_interleave(torch.arange(stop - start), starts.diff()),
            "positions": batch.positions[first:last],
            "items": items,
            "negatives": negatives,
            "calls": [items, negatives],
            "ids": ids,
            "lengths": lengths,
            "negative_ids": batch.negatives,
        }

    def loss(self, model: Recommender, micro_batch: MicroBatch) -> Sums:
        """See `Objective`."""
        noise = None
        if model.training:
            samples = micro_batch["samples"][micro_batch["owners"]] + (micro_batch["positions"] << _WINDOW_BITS)
            noise = DropoutKey(seed=self._seed, step=micro_batch["step"], samples=tuple(samples.tolist()))
        return {"loss": model(lambda: self._loss(model, micro_batch, noise))}

    def count(self, micro_batch: MicroBatch) -> int:
        """See `Objective`."""
        return int((micro_batch["lengths"] - 1).clamp(min=0).sum())

    def evaluate(
        self, model: Recommender, rows: ClickDataset, batches: Iterable[NDArray[np.int64]], world: World
    ) -> dict[str, float]:
        """hr@k, ndcg@k and mrr of the last item of every sequence among all items, the share of last items that are not
        among them (misses all), popularity's hr@k, and the loss over the others."""
        items = model(lambda: self.item_vectors(model))
        metrics, popular, total = build_ranking_metrics(self._top), build_ranking_metrics(self._top), 0.0
        popularity = self._catalogue.popularity_ranks()
        for indices in batches:
            batch = rows.batch(indices)
            sequences = batch.sequences[self._feature]
            lengths = (sequences.lengths - NUM_HELD_OUT).clamp(min=0)
            histories = sequences.ids[:, :-NUM_HELD_OUT]
            states = model(lambda ids=histories, lengths=lengths: self.states(model, ids, lengths))
            last = sequences.ids.gather(1, (sequences.lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
            item_indices = self._catalogue.indices_of(last)
            wants = lengths.numpy() > 0
            asks = wants & (item_indices >= 0)
            asking, targets = states[torch.from_numpy(asks)], item_indices[asks]
            seen = None
            if self._excludes_seen:
                seen = self._catalogue.history_indices(batch, self.histories, NUM_HELD_OUT)[asks]
            ranks, loss = rank_users(partial(_block_scores, asking, items), targets, len(items), seen)
            total += loss
            for counted, counted_ranks in ((metrics, ranks), (popular, ranks_without(popularity, targets, seen))):
                counted.add(counted_ranks)
                counted.num_cold += int((wants & (item_indices < 0)).sum())
        baseline = {f"popularity_hr@{self._top}": all_reduce_ranking_metrics(popular, 0.0, world)[f"hr@{self._top}"]}
        return all_reduce_ranking_metrics(metrics, total, world) | baseline

    def states(self, model: Recommender, ids: Tensor, lengths: Tensor) -> Tensor:
        """What stands at the end of histories ids [B, L] of these lengths [B], to be compared with items: [B, dim]. Of
        longer histories than the network reads, the last items count."""
        network = network_of(model)
        width = min(self._window, ids.shape[1])
        starts = (lengths - self._window).clamp(min=0).unsqueeze(1)
        ids = ids.gather(1, (starts + torch.arange(width)).clamp(max=max(ids.shape[1] - 1, 0)))
        lengths = lengths.clamp(max=width)
        vectors = pad_sequences(self._rows(model, self._request(ids, lengths)), lengths, width)
        return network.last(network(vectors, lengths), lengths.clamp(min=1))

    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        """See `RetrievalObjective`; nothing of a history is held out."""
        sequence = batch.sequences[self._feature]
        return self.states(model, sequence.ids, sequence.lengths)

    def item_vectors(self, model: Recommender) -> Tensor:
        """See `RetrievalObjective`."""
        ids = torch.from_numpy(self._catalogue.ids)
        return torch.cat([self._rows(model, self._ids_request(part)) for part in torch.split(ids, ITEM_BATCH)])

    def _loss(self, model: Recommender, micro_batch: MicroBatch, noise: DropoutKey | None) -> Tensor:
        ids, lengths = micro_batch["ids"], micro_batch["lengths"]
        # As long for every micro-batch, as noise is drawn for the whole of it.
        vectors = pad_sequences(self._rows(model, micro_batch["items"]), lengths, ids.shape[1])
        negatives = self._rows(model, micro_batch["negatives"])
        before = (lengths - 1).clamp(min=0)
        asks = torch.arange(vectors.shape[1] - 1) < before.unsqueeze(1)
        if not bool(asks.any()):
            # Nothing is asked, and yet all ranks and all weights take part.
            unused = sum((weight.sum() for weight in model.network.parameters()), vectors.sum() + negatives.sum())
            return unused * 0.0
        states = network_of(model)(vectors[:, :-1], before, noise)[asks]
        wanted = (states * vectors[:, 1:][asks]).sum(1, keepdim=True)
        # The K are drawn from all I items, and the wanted one is left out where it is drawn: each stands for I / K.
        others = states @ negatives.t() + math.log(len(self._catalogue) / len(negatives))
        is_wanted = ids[:, 1:][asks].unsqueeze(1) == micro_batch["negative_ids"]
        others = others.masked_fill(is_wanted.to(others.device), -math.inf)
        scores = torch.cat([wanted, others], dim=1)
        return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64), reduction="sum")

    def _rows(self, model: Recommender, request: Mapping[str, Any]) -> Tensor:
        (rows,) = model.tables(request).values()
        result: Tensor = rows
        return result

    def _request(self, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        return self._ids_request(ids[torch.arange(ids.shape[1]) < lengths.unsqueeze(1)])

    def _ids_request(self, ids: Tensor) -> dict[str, Any]:
        return self._plan.request_of(LOOKUP, self._feature, ids)


def cut(sequences: IdSequence, window: int, cuts: NDArray[np.int64]) -> tuple[IdSequence, Tensor]:
    """Windows of sequences [B, L] without the items that are held out, and whose each is. A window has at most
    `window` + 1 items and begins with the last one of the window before it, so that each item but the first of a
    sequence is asked for once. Sequences of more items are cut first behind so many (`cuts` [B], below `window`)."""
    num_items = (sequences.lengths.numpy() - NUM_HELD_OUT).clip(min=0)
    asked = (num_items - 1).clip(min=0)
    cuts = np.where(asked > window, cuts, 0)
    has_cut = cuts > 0
    num_windows = np.maximum(-(-(asked - cuts) // window), 1) + np.where(has_cut, 1, 0)
    owners = np.repeat(np.arange(len(num_items)), num_windows)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    # Where a window ends if the sequence does not end before.
    ends = np.where(has_cut[owners], cuts[owners] + positions * window, (positions + 1) * window)
    begins = np.where(positions > 0, ends - window, 0)
    lengths = np.minimum(np.minimum(ends, asked[owners]) + 1 - begins, num_items[owners])
    width = min(window + 1, sequences.ids.shape[1])
    chosen = begins[:, None] + np.arange(width)
    is_there = np.arange(width) < lengths[:, None]
    ids = sequences.ids.numpy()[owners[:, None], np.where(is_there, chosen, 0)] * is_there
    return IdSequence(ids=torch.from_numpy(ids), lengths=torch.from_numpy(lengths)), torch.from_numpy(owners)


def _block_scores(states: Tensor, items: Tensor, block: slice) -> Tensor:
    return states[block] @ items.t()


def network_of(model: Recommender) -> SASRec:
    """The network of a model that looks at sequences."""
    network = model.network
    assert isinstance(network, SASRec)
    return network
