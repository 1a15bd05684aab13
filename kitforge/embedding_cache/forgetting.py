"""Rows that are given up for good: too old, too rarely moved, or too small."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.optim.sparse import RowLayout
from kitforge.embedding_cache.options import ForgettingOptions
from kitforge.embedding_cache.planner import Planner
from kitforge.embedding_cache.records import InitialRecords
from kitforge.embedding_cache.watchers import RowsAt, Watchers

# Rows looked at together.
CHUNK = 2**15


@final
class Forgetting:
    """Goes through all tiers at a step boundary. What it forgets depends on rows alone, not on where they are.

    A row that a planned lookup already waits for begins anew where it stands; the place of any other is free.
    """

    def __init__(
        self, options: ForgettingOptions, planner: Planner, initial: InitialRecords, watchers: Watchers
    ) -> None:
        self._options, self._initial = options, initial
        self._planner, self._device, self._ladder = planner, planner.device, planner.ladder
        self._watchers = watchers

    def is_due(self, num_steps: int) -> bool:
        """Whether rows are to be forgotten after that many steps."""
        return self._options.every > 0 and num_steps > 0 and num_steps % self._options.every == 0

    def run(self, num_steps: int) -> Tensor:
        """Forget, while nobody plans; the keys of the rows that went."""
        # Below first: what is there of rows that the device has are old copies, which do not count.
        below = self._from_below(num_steps)
        gone = torch.cat([*below, self._from_device(num_steps)])
        if len(gone):
            self._ladder.delete(gone)
        return gone

    def _from_device(self, num_steps: int) -> Tensor:
        device, layout = self._device, self._initial.layout
        parts = [device.index.used()[:0]]
        for slots in torch.split(device.index.used(), CHUNK):
            parts.append(slots[goes(self._options, layout, device.rows(slots), num_steps)])
            keys = device.index.keys_at(parts[-1])
            self._watchers.before_change(keys, _rows_of(device.rows(parts[-1])))
        slots = torch.cat(parts)
        keys, is_needed = device.index.keys_at(slots), self._planner.needed(slots, slots[:0])
        device.index.remove(slots[~is_needed])
        self._begin_anew(slots[is_needed])
        return keys

    def _begin_anew(self, slots: Tensor) -> None:
        keys = self._device.index.keys_at(slots)
        rows = torch.empty(len(keys), self._initial.layout.width)
        self._initial.fill(keys, rows)
        with self._device.using() as slab:
            slab[self._device.there(slots)] = rows.to(slab.device)
            self._device.is_dirty[slots] = False
        self._planner.begin_anew(slots)

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
