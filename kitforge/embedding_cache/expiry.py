"""Feature eviction: deletes rows that are too old, too rarely updated, or too small."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kitforge.core.optim.row_optimizers import RowLayout
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.changes import ChangeTracker
from kitforge.embedding_cache.keys.row_init import RowInitializer
from kitforge.embedding_cache.options import ExpiryOptions

# Rows read at a time.
CHUNK_ROWS = 2**15


class RowExpiry:
    """Deletes rows at a step boundary. Which rows expire depends on the rows alone, not on their tier.

    With bounds of age and of updates, the first step at which a row may expire is known when it changes: its key is in
    the bucket of that step, and only due buckets are read. A row that has changed meanwhile goes to a later bucket. A
    bound of the norm predicts nothing: then all rows are read.

    An expired row that a planned lookup waits for is initialized anew in its slot; any other slot is freed.
    """

    def __init__(
        self, options: ExpiryOptions, manager: CacheManager, row_initializer: RowInitializer, changes: ChangeTracker
    ) -> None:
        self._options, self._row_initializer, self._changes = options, row_initializer, changes
        self._manager, self._device, self._tiers = manager, manager.device, manager.tiers
        self.has_buckets = options.every > 0 and options.min_norm is None
        self.buckets: dict[int, list[Tensor]] = {}  # keys by step

    def on_update(self, keys: Tensor, last_steps: Tensor, num_steps: int) -> None:
        """These rows [n], last updated at these steps [n], were updated for the first time or restored: they may expire
        from now on."""
        if self._options.min_updates is not None:
            last_steps = torch.full((len(keys),), num_steps - (self._options.max_age or 0) - 1)
        self._put(keys, last_steps)

    def run(self, num_steps: int) -> Tensor:
        """Delete expired rows, while no other thread plans; their keys."""
        layout, gone = self._row_initializer.layout, [torch.zeros(0, dtype=torch.int64)]
        for keys, rows in self._due(num_steps) if self.has_buckets else self._all():
            going = is_expired(self._options, layout, rows, num_steps)
            self._changes.notify(keys[going], partial(torch.index_select, rows[going], 0))
            gone.append(keys[going])
            counters = layout.as_integers(rows)
            stays = ~going & (counters[:, layout.updates] > 0)
            if self.has_buckets and self._options.max_age is not None:
                self._put(keys[stays], counters[stays][:, layout.last_step])
        expired = torch.cat(gone)
        slots = self._device.index.lookup(expired)
        slots = slots[slots >= 0]
        is_needed = self._manager.is_pinned(slots, slots[:0])
        # A lookup reads these slots, which get their initial rows.
        needed = slots[is_needed]
        initial = torch.empty(len(needed), layout.width)
        self._row_initializer.fill(self._device.index.keys_at(needed), initial)
        with self._device.slab_lock:
            slab = self._device.slab
            slab[needed.to(slab.device)] = initial.to(slab.device)
            self._device.is_dirty[needed] = False
        self._manager.mark_fresh(needed)
        self._device.index.remove(slots[~is_needed])
        if len(expired):
            self._tiers.delete(expired)
        return expired

    def _put(self, keys: Tensor, last_steps: Tensor) -> None:
        """Put keys into the buckets of the first steps at which rows last updated at `last_steps` may be too old."""
        every = self._options.every
        steps = -(-(last_steps.long() + (self._options.max_age or 0) + 1) // every) * every
        for step in torch.unique(steps).tolist():
            self.buckets.setdefault(step, []).append(keys[steps == step])

    def _due(self, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of the due buckets, from the highest tier that has them; zeros for a row that no tier has."""
        due = [step for step in self.buckets if step <= num_steps]
        found = [keys for step in due for keys in self.buckets.pop(step)]
        if not found:
            return
        for keys in torch.split(torch.unique(torch.cat(found)), CHUNK_ROWS):
            rows = torch.zeros(len(keys), self._row_initializer.layout.width)
            slots = self._device.index.lookup(keys)
            here, below = slots >= 0, (slots < 0).nonzero().squeeze(1)
            rows[here] = self._device.rows(slots[here])
            lower = rows[below]
            self._tiers.read(keys[below], lower)
            rows[below] = lower
            yield keys, rows

    def _all(self) -> Iterator[tuple[Tensor, Tensor]]:
        for slots in torch.split(self._device.index.used(), CHUNK_ROWS):
            yield self._device.index.keys_at(slots), self._device.rows(slots)
        for keys, rows in self._tiers.scan(CHUNK_ROWS):
            # Rows below that the device tier also has are old copies.
            own = self._device.index.lookup(keys) < 0
            yield keys[own], rows[own]


def is_expired(options: ExpiryOptions, layout: RowLayout, rows: Tensor, num_steps: int) -> Tensor:
    """The mask of the expired ones among these records [n, width]. Rows that were never updated do not expire."""
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
