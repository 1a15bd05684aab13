"""Batches of features. Shapes: B rows, d dense features, L positions of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IdBag:
    """Row i has ids[offsets[i] : offsets[i + 1]]."""

    ids: Tensor  # int64 [total]
    offsets: Tensor  # int64 [B + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSequence:
    """Row i has lengths[i] ids; the padding is 0."""

    ids: Tensor  # int64 [B, L]
    lengths: Tensor  # int64 [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureBatch:
    """Features by name, as tensors on the CPU."""

    dense: Tensor  # float32 [B, d]
    ids: Mapping[str, Tensor]  # int64 [B]: categorical, bucketed and crossed features
    bags: Mapping[str, IdBag]
    sequences: Mapping[str, IdSequence]
    labels: Tensor | None = None  # float32 [B]
    groups: Tensor | None = None  # int64 [B]

    def __len__(self) -> int:
        return len(self.dense)

    def narrow(self, start: int, stop: int) -> FeatureBatch:
        """Rows start .. stop - 1, as views if possible."""
        bags = {}
        for name, bag in self.bags.items():
            offsets = bag.offsets[start : stop + 1]
            bags[name] = IdBag(ids=bag.ids[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])
        return self._changed(lambda rows: rows[start:stop], bags)

    def take(self, numbers: Tensor) -> FeatureBatch:
        """The rows of these numbers [n], in this order."""
        bags = {}
        for name, bag in self.bags.items():
            lengths = bag.offsets.diff()[numbers]
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            shifts = torch.repeat_interleave(bag.offsets[numbers] - offsets[:-1], lengths)
            bags[name] = IdBag(ids=bag.ids[torch.arange(len(shifts)) + shifts], offsets=offsets)
        return self._changed(lambda rows: rows[numbers], bags)

    @staticmethod
    def concatenate(batches: Sized[FeatureBatch]) -> FeatureBatch:
        """The rows of batches of one encoder, without labels and groups."""
        if len(batches) == 1:
            return batches[0]
        first = batches[0]
        bags = {}
        for name in first.bags:
            parts = [batch.bags[name] for batch in batches]
            lengths = torch.cat([part.offsets.diff() for part in parts])
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            bags[name] = IdBag(ids=torch.cat([part.ids for part in parts]), offsets=offsets)
        return FeatureBatch(
            dense=torch.cat([batch.dense for batch in batches]),
            ids={name: torch.cat([batch.ids[name] for batch in batches]) for name in first.ids},
            bags=bags,
            sequences={
                name: IdSequence(
                    ids=torch.cat([batch.sequences[name].ids for batch in batches]),
                    lengths=torch.cat([batch.sequences[name].lengths for batch in batches]),
                )
                for name in first.sequences
            },
        )

    def _changed(self, change: Callable[[Tensor], Tensor], bags: Mapping[str, IdBag]) -> FeatureBatch:
        """All tensors changed along the rows, with these bags."""
        return FeatureBatch(
            dense=change(self.dense),
            ids={name: change(ids) for name, ids in self.ids.items()},
            bags=bags,
            sequences={
                name: IdSequence(ids=change(item.ids), lengths=change(item.lengths))
                for name, item in self.sequences.items()
            },
            labels=None if self.labels is None else change(self.labels),
            groups=None if self.groups is None else change(self.groups),
        )
