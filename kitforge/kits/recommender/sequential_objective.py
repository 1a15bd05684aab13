"""Sequential recommendation: next-item prediction with a sampled softmax.

The negatives are drawn once per step, so the loss does not depend on micro-batches or ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kitforge.core.nn.context import DropoutKey
from kitforge.data.splitmix64 import hash_array
from kitforge.foundation import seed as seeds
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch, IdSequence
from kitforge.kits.recommender.config import RecommendationDataOptions, RecommendationOptions
from kitforge.kits.recommender.data import schema_of
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.model import EmbeddingRequestPlan, Recommender, pad_sequences
from kitforge.kits.recommender.objective import RetrievalObjective
from kitforge.kits.recommender.schema import FeatureSchema, with_own_items, with_rare_values
from kitforge.kits.recommender.two_tower_objective import ITEM_BATCH
from kitforge.models.sasrec.model import SASRecConfig

# Dropout keys: the window number stands above the bits of the sample number.
_WINDOW_BITS = 40
# The last item of every sequence is held out for evaluation.
NUM_HELD_OUT = 1
# Events of a user that are trained on where no schema says how many, the newest ones: in windows of max_length.
LONGEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """This rank's sequences of a step, cut into windows of the network's length, and the step's negatives. Sample i has
    the windows starts[i] .. starts[i + 1] - 1."""

    windows: IdSequence
    starts: Tensor  # int64 [B + 1]
    positions: Tensor  # int64 [windows]: number of the window within its sample
    negatives: Tensor  # int64 [K]


class SampledSoftmax(RetrievalObjective[SequenceBatch]):
    """Sampled softmax over the next item and K uniform negatives (Jean et al., 2015)."""

    num_held_out = NUM_HELD_OUT
    is_scored = False
    exported_part = None

    @classmethod
    def default_schema(cls, config: SASRecConfig, rows: Any, data: RecommendationDataOptions) -> FeatureSchema:
        """See `Objective`. Events become sequences, and every item is to be found, however rare."""
        guessed = schema_of(rows, data, is_scored=False, has_sequences=True)
        if guessed.events is not None:
            length = max(LONGEST, config.max_length + NUM_HELD_OUT)
            longer = {name: replace(each, max_length=length) for name, each in guessed.sequences.items()}
            guessed = replace(guessed, sequences=longer)
        return with_own_items(with_rare_values(guessed), tuple(guessed.sequences))

    def __init__(
        self, config: SASRecConfig, plan: EmbeddingRequestPlan, catalogue: ItemCatalog, options: RecommendationOptions
    ) -> None:
        super().__init__(config, plan, catalogue, options)
        ((self._feature,),) = (each.features for each in plan.lookups)
        self.item_feature = self._feature
        self._window = config.max_length
        self.user_features = self.histories = (self._feature,)
        self._num_negatives = min(options.retrieval.num_negatives, len(catalogue))

    def read(self, rows: ClickDataset, indices: NDArray[np.int64], own: slice, step: int) -> SequenceBatch:
        generator = seeds.generator(self._seed, "negatives", step)
        drawn = torch.randint(len(self._catalogue), (self._num_negatives,), generator=generator).numpy()
        sequences = rows.batch(indices[own]).sequences[self._feature]
        # The cuts vary by step, so that no item always has the shortest history.
        numbers = np.arange(own.start, own.start + len(sequences.lengths)).astype(np.uint64)
        cuts = hash_array(numbers, seeds.key(self._seed, "windows", step)) % np.uint64(self._window)
        windows, owners = training_windows(sequences, self._window, cuts.astype(np.int64))
        starts = torch.searchsorted(owners, torch.arange(len(sequences.lengths) + 1))
        positions = torch.arange(len(owners)) - starts[owners]
        negatives = torch.from_numpy(self._catalogue.ids[drawn])
        return SequenceBatch(windows=windows, starts=starts, positions=positions, negatives=negatives)

    def micro_batch(self, batch: SequenceBatch, start: int, stop: int) -> Mapping[str, Any]:
        starts = batch.starts[start : stop + 1]
        first, last = int(starts[0]), int(starts[-1])
        ids, lengths = batch.windows.ids[first:last], batch.windows.lengths[first:last]
        items, negatives = self._request(ids, lengths), self._request(batch.negatives)
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
        dropout_key = None
        if model.training:
            samples = micro_batch["samples"][micro_batch["owners"]] + (micro_batch["positions"] << _WINDOW_BITS)
            dropout_key = DropoutKey(seed=self._seed, step=micro_batch["step"], samples=tuple(samples.tolist()))
        return {"loss": model(lambda: self._loss(model, micro_batch, dropout_key))}

    def count(self, micro_batch: MicroBatch) -> int:
        return int((micro_batch["lengths"] - 1).clamp(min=0).sum())

    def evaluation_queries(self, model: Recommender, batch: FeatureBatch) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """See `RetrievalObjective`. The last item of every sequence is retrieved from the items before it."""
        sequences = batch.sequences[self._feature]
        lengths = (sequences.lengths - NUM_HELD_OUT).clamp(min=0)
        states = model(lambda: self.states(model, sequences.ids[:, :-NUM_HELD_OUT], lengths))
        last = sequences.ids.gather(1, (sequences.lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        return states, last, lengths.numpy() > 0

    def scores(self, model: Recommender, users: Tensor, items: Tensor) -> Tensor:
        return users @ items.t()

    def states(self, model: Recommender, ids: Tensor, lengths: Tensor) -> Tensor:
        """The last hidden state [B, dim] of histories: ids [B, L], lengths [B]. Histories longer than the window keep
        their last items."""
        network: Any = model.network
        width = min(self._window, ids.shape[1])
        starts = (lengths - self._window).clamp(min=0).unsqueeze(1)
        ids = ids.gather(1, (starts + torch.arange(width)).clamp(max=max(ids.shape[1] - 1, 0)))
        lengths = lengths.clamp(max=width)
        vectors = pad_sequences(self._rows(model, self._request(ids, lengths)), lengths, width)
        states: Tensor = network.last(network(vectors, lengths), lengths.clamp(min=1))
        return states

    def user_vectors(self, model: Recommender, batch: FeatureBatch) -> Tensor:
        """See `RetrievalObjective`. Reads the whole history."""
        sequence = batch.sequences[self._feature]
        return self.states(model, sequence.ids, sequence.lengths)

    def item_vectors(self, model: Recommender) -> Tensor:
        ids = torch.from_numpy(self._catalogue.ids)
        return torch.cat([self._rows(model, self._request(part)) for part in torch.split(ids, ITEM_BATCH)])

    def _loss(self, model: Recommender, micro_batch: MicroBatch, dropout_key: DropoutKey | None) -> Tensor:
        ids, lengths = micro_batch["ids"], micro_batch["lengths"]
        # One length for all micro-batches: dropout noise is drawn for the whole of it.
        vectors = pad_sequences(self._rows(model, micro_batch["items"]), lengths, ids.shape[1])
        negatives = self._rows(model, micro_batch["negatives"])
        before = (lengths - 1).clamp(min=0)
        asks = torch.arange(vectors.shape[1] - 1) < before.unsqueeze(1)
        if not bool(asks.any()):
            # No targets here, but all ranks and all weights must take part in backward.
            unused = sum((weight.sum() for weight in model.network.parameters()), vectors.sum() + negatives.sum())
            return unused * 0.0
        there = copy_to(asks.flatten().nonzero().squeeze(1), vectors.device)
        states, targets = (
            each.flatten(0, 1).index_select(0, there)
            for each in (model.network(vectors[:, :-1], before, dropout_key), vectors[:, 1:])
        )
        wanted = (states * targets).sum(1, keepdim=True)
        # Each of the K negatives stands for I / K items; a drawn target is masked out.
        others = states @ negatives.t() + math.log(len(self._catalogue) / len(negatives))
        own, negative = (copy_to(each, others.device) for each in (ids[:, 1:][asks], micro_batch["negative_ids"]))
        others = others.masked_fill(own.unsqueeze(1) == negative, -math.inf)
        scores = torch.cat([wanted, others], dim=1)
        return functional.cross_entropy(scores, there.new_zeros(len(scores)), reduction="sum")

    def _rows(self, model: Recommender, request: Mapping[str, Any]) -> Tensor:
        (rows,) = model.tables(request).values()
        result: Tensor = rows
        return result

    def _request(self, ids: Tensor, lengths: Tensor | None = None) -> dict[str, Any]:
        """The lookup of item ids [n], or of sequences [B, L] without their padding."""
        if lengths is not None:
            ids = ids[torch.arange(ids.shape[1]) < lengths.unsqueeze(1)]
        return self._plan.request_of("items", self._feature, ids)


def training_windows(sequences: IdSequence, window: int, cuts: NDArray[np.int64]) -> tuple[IdSequence, Tensor]:
    """Windows of sequences [B, L] without held-out items, and the sequence of each window.

    A window has at most `window` + 1 items and begins with the last item of the window before, so each item but the
    first of a sequence is a target once. The first window of longer sequences ends after `cuts` [B] (below `window`).
    """
    num_items = (sequences.lengths.numpy() - NUM_HELD_OUT).clip(min=0)
    asked = (num_items - 1).clip(min=0)
    cuts = np.where(asked > window, cuts, 0)
    has_cut = cuts > 0
    num_windows = np.maximum(-(-(asked - cuts) // window), 1) + np.where(has_cut, 1, 0)
    owners = np.repeat(np.arange(len(num_items)), num_windows)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    # The end of each window, unless the sequence ends before.
    ends = np.where(has_cut[owners], cuts[owners] + positions * window, (positions + 1) * window)
    begins = np.where(positions > 0, ends - window, 0)
    lengths = np.minimum(np.minimum(ends, asked[owners]) + 1 - begins, num_items[owners])
    width = min(window + 1, sequences.ids.shape[1])
    chosen = begins[:, None] + np.arange(width)
    is_there = np.arange(width) < lengths[:, None]
    ids = sequences.ids.numpy()[owners[:, None], np.where(is_there, chosen, 0)] * is_there
    return IdSequence(ids=torch.from_numpy(ids), lengths=torch.from_numpy(lengths)), torch.from_numpy(owners)
