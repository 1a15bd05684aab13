"""Rows that are given up for good: too old, too rarely moved, or too small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from kitforge.core.optim.row_optimizers import RowLayout
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.copy_on_write import RowsAt, WriteObservers
from kitforge.embedding_cache.options import ExpiryOptions
from kitforge.embedding_cache.row_init import RowInitializer

# Rows looked at together.
CHUNK_ROWS = 2**15


@final
class RowExpiry:
    """Lets rows go at a step boundary. What it forgets depends on rows alone, not on where they are.

    Bounds of age and of updates hold a row for a while that is known when it changes: each key that has moved stands in
    the bucket of the first step at which its row may have to go, and only due buckets are read. A row that has changed
    meanwhile is put into a later one. A bound of the norm says nothing beforehand: then all rows are read.

    A row that a planned lookup already waits for begins anew where it stands; the place of any other is free.
    """

    def __init__(
        self,
        options: ExpiryOptions,
        manager: CacheManager,
        row_initializer: RowInitializer,
        write_observers: WriteObservers,
    ) -> None:
        self._options, self._row_initializer = options, row_initializer
        self._manager, self._device, self._hierarchy = manager, manager.device, manager.hierarchy
        self._write_observers = write_observers
        self.has_buckets = options.every > 0 and options.min_norm is None
        self._buckets: dict[int, list[Tensor]] = {}  # keys by step

    def is_due(self, num_steps: int) -> bool:
        """Whether rows are to be forgotten after that many steps."""
        return self._options.every > 0 and num_steps > 0 and num_steps % self._options.every == 0

    def changed(self, keys: Tensor, last_steps: Tensor, num_steps: int) -> None:
        """These rows [n], which changed last at these steps [n], moved for the first time or were restored: from now
        on they may have to go."""
        if self._options.min_updates is not None:
            last_steps = torch.full((len(keys),), num_steps - (self._options.max_age or 0) - 1)
        self._put(keys, last_steps)

    def clear(self) -> None:
        """Know of no row."""
        self._buckets = {}

    def run(self, num_steps: int) -> Tensor:
        """Forget, while nobody plans; the keys of the rows that went."""
        layout, gone = self._row_initializer.layout, [torch.zeros(0, dtype=torch.int64)]
        for keys, rows in self._due(num_steps) if self.has_buckets else self._all():
            going = is_expired(self._options, layout, rows, num_steps)
            self._write_observers.before_change(keys[going], _rows_of(rows[going]))
            gone.append(keys[going])
            counters = layout.as_integers(rows)
            stays = ~going & (counters[:, layout.updates] > 0)
            if self.has_buckets and self._options.max_age is not None:
                self._put(keys[stays], counters[stays][:, layout.last_step])
        found = torch.cat(gone)
        slots = self._device.index.lookup(found)
        slots = slots[slots >= 0]
        is_needed = self._manager.is_pinned(slots, slots[:0])
        self._reinitialize(slots[is_needed])
        self._device.index.remove(slots[~is_needed])
        if len(found):
            self._hierarchy.delete(found)
        return found

    def _put(self, keys: Tensor, last_steps: Tensor) -> None:
        """Into the buckets of the first steps at which rows that changed at these steps may be too old."""
        every = self._options.every
        steps = -(-(last_steps.long() + (self._options.max_age or 0) + 1) // every) * every
        for step in torch.unique(steps).tolist():
            self._buckets.setdefault(step, []).append(keys[steps == step])

    def _due(self, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of the buckets that are due, from the highest tier that has them; zeros for one that has none."""
        due = [step for step in self._buckets if step <= num_steps]
        found = [keys for step in due for keys in self._buckets.pop(step)]
        if not found:
            return
        for keys in torch.split(torch.unique(torch.cat(found)), CHUNK_ROWS):
            rows = torch.zeros(len(keys), self._row_initializer.layout.width)
            slots = self._device.index.lookup(keys)
            here, below = slots >= 0, (slots < 0).nonzero().squeeze(1)
            rows[here] = self._device.rows(slots[here])
            lower = rows[below]
            # The host tier comes last: what lies below of its rows is old.
            self._hierarchy.peek_store(keys[below], lower)
            self._hierarchy.peek_host(keys[below], lower)
            rows[below] = lower
            yield keys, rows

    def _all(self) -> Iterator[tuple[Tensor, Tensor]]:
        for slots in torch.split(self._device.index.used(), CHUNK_ROWS):
            yield self._device.index.keys_at(slots), self._device.rows(slots)
        for keys, rows in self._hierarchy.scan(CHUNK_ROWS):
            # What is there of rows that the device has are old copies, which do not count.
            own = self._device.index.lookup(keys) < 0
            yield keys[own], rows[own]

    def _reinitialize(self, slots: Tensor) -> None:
        keys = self._device.index.keys_at(slots)
        rows = torch.empty(len(keys), self._row_initializer.layout.width)
        self._row_initializer.fill(keys, rows)
        with self._device.using() as slab:
            slab[self._device.to_device(slots)] = rows.to(slab.device)
            self._device.is_dirty[slots] = False
        self._manager.mark_fresh(slots)


def _rows_of(rows: Tensor) -> RowsAt:
    return lambda positions: rows[positions]


def is_expired(options: ExpiryOptions, layout: RowLayout, rows: Tensor, num_steps: int) -> Tensor:
    """Which of these records [n, width] are to be forgotten. Rows that never moved are nothing to forget."""
    counters = layout.as_integers(rows)
    updates = counters[:, layout.updates]
    going = torch.zeros(len(rows), dtype=torch.bool)
    if options.max_age is not None:
        going |= num_steps - counters[:, layout.last_step] > options.max_age
    if options.min_updates is not None:
        going |= updates < options.min_updates
    if options.min_norm is not None:
        going |= (rows[:, : layout.dim].double() ** 2).sum(1).sqrt() < options.min_norm
    return going & (updates > 0)
