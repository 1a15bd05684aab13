"""Micro-batches of pairs: the chosen responses [P, T], then the rejected ones, in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.data.dialogues import Pair
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.collate import padded
from kitforge.kits.rlhf.config import StageOptions
from kitforge.kits.rlhf.order import Indices, Order
from kitforge.kits.rlhf.rows import Rows


@final
class PairBatches:
    """Holds tokens and targets [2P, length], ends [2P], margins and weights [P] and the pairs' sources. A weight is 1,
    or 0 for the pair that stands in for none."""

    def __init__(self, options: StageOptions, rows: Rows[Pair], world: World) -> None:
        self._rows = rows
        self._order = Order(len(rows.train), options, world)
        self.sources = sorted({pair.source for pair in rows.eval if pair.source})

    def num_steps(self, epochs: float) -> int:
        """Steps in that many passes over the pairs."""
        return self._order.num_steps(epochs)

    def steps(self, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from the cursor on."""
        for batch in self._order.batches(cursor):
            yield self._micro_batches(self._rows.train, batch)

    def evaluation(self) -> Iterator[MicroBatch]:
        """The micro-batches of the evaluation pairs."""
        for batch in self._order.evaluation(len(self._rows.eval)):
            yield from self._micro_batches(self._rows.eval, batch)

    def responses(self, most: int) -> Iterator[MicroBatch]:
        """Every rank's first training pairs, for figures over what a model was trained on."""
        chosen = np.arange(min(most, len(self._rows.train)), dtype=np.int64)
        yield from self._micro_batches(self._rows.train, chosen)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Pairs of this rank's part of the step."""
        pairs = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        return {"loss": pairs, "samples": pairs}

    def _micro_batches(self, rows: Sequence[Pair], batch: Indices) -> list[MicroBatch]:
        longest = [max(len(rows[index].chosen.tokens), len(rows[index].rejected.tokens)) for index in batch]
        parts = self._order.fitted([2 * length for length in longest], None)
        return [self._micro_batch([rows[index] for index in batch[part]]) for part in parts]

    def _micro_batch(self, pairs: Sequence[Pair]) -> MicroBatch:
        # A rank that has no pair left computes one that counts for nothing.
        responses = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        whole = padded(responses, self._rows.pad_id)
        if not pairs:
            whole = {name: torch.cat([column, column]) for name, column in whole.items()}
        return {
            **whole,
            "margins": torch.tensor([pair.margin for pair in pairs] or [0.0]),
            "weights": torch.ones(len(pairs)) if pairs else torch.zeros(1),
            "sources": [pair.source for pair in pairs] or [""],
        }


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected [P] of both [2P]."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected
