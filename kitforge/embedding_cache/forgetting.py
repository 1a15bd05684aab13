"""Rows that are given up for good: too old, too rarely moved, or too small."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.optim.sparse import RowLayout
from kitforge.embedding_cache.options import ForgettingOptions
from kitforge.embedding_cache.records import InitialRecords
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.ladder import Ladder
from kitforge.embedding_cache.watchers import RowsAt, Watchers

# Rows looked at together.
CHUNK = 2**15


@final
class Forgetting:
    """Goes through all tiers at a step boundary. What it forgets depends on rows alone, not on where they are.

    A row that a planned lookup already waits for begins anew where it stands.
    """

    def __init__(
        self, options: ForgettingOptions, tiers: tuple[DeviceTier, Ladder], initial: InitialRecords, watchers: Watchers
    ) -> None:
        self._options, self._initial = options, initial
        self._device, self._ladder = tiers
        self._watchers = watchers
        # By step, in ascending order: the keys that went then.
        self.removed: list[tuple[int, Tensor]] = []

    def is_due(self, num_steps: int) -> bool:
        """Whether rows are to be forgotten after that many steps."""
        return self._options.every > 0 and num_steps > 0 and num_steps % self._options.every == 0

    def run(self, num_steps: int) -> int:
        """Forget, while nobody plans; how many rows went."""
        above, below = self._from_device(num_steps), self._from_below(num_steps)
        gone = torch.cat([*above, *below, torch.empty(0, dtype=torch.int64)])
        if len(gone):
            self._ladder.delete(gone)
            self.removed.append((num_steps, gone))
        return len(gone)

    def trim(self, until: int) -> None:
        """Keep no memory of what went up to that step."""
        self.removed = [(step, keys) for step, keys in self.removed if step > until]

    def _from_device(self, num_steps: int) -> list[Tensor]:
        gone = []
        for slots in torch.split(self._device.index.used(), CHUNK):
            slots = slots[goes(self._options, self._initial.layout, self._device.rows(slots), num_steps)]
            keys = self._device.index.keys_at(slots)
            rows = torch.empty(len(keys), self._initial.layout.width)
            self._initial.fill(keys, rows)
            with self._device.using() as slab:
                self._watchers.before_change(keys, _rows_of(self._device.rows(slots)))
                slab[self._device.there(slots)] = rows.to(slab.device)
                self._device.is_dirty[slots] = False
            gone.append(keys)
        return gone

    def _from_below(self, num_steps: int) -> list[Tensor]:
        gone = []
        for keys, rows in self._ladder.scan(CHUNK):
            going = goes(self._options, self._initial.layout, rows, num_steps) & (self._device.index.lookup(keys) < 0)
            self._watchers.before_change(keys[going], _rows_of(rows[going]))
            gone.append(keys[going])
        return gone


def _rows_of(rows: Tensor) -> RowsAt:
    return lambda places: rows[places]


def goes(options: ForgettingOptions, layout: RowLayout, rows: Tensor, num_steps: int) -> Tensor:
    """Which of these records [n, width] are to be forgotten. Rows that never moved are nothing to forget."""
    counters = layout.whole(rows)
    updates = counters[:, layout.updates]
    going = torch.zeros(len(rows), dtype=torch.bool)
    if options.age is not None:
        going |= num_steps - counters[:, layout.last_step] > options.age
    if options.updates is not None:
        going |= updates < options.updates
    if options.norm is not None:
        going |= (rows[:, : layout.dim].double() ** 2).sum(1).sqrt() < options.norm
    return going & (updates > 0)
