"""Decides where the rows of a lookup live, and moves them there. It never looks at a value.

Legend: u distinct keys of a lookup.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.indexing import at, put, where
from kitforge.core.kernels.workspace import Workspace
from kitforge.embedding_cache.eviction.policy import EvictionPolicy, build_policy
from kitforge.embedding_cache.keys.key_map import encode_other_tier
from kitforge.embedding_cache.keys.slot_table import NEVER_USED
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.pins import PinRegistry
from kitforge.embedding_cache.stats import TableCounters
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.hierarchy import TierHierarchy
from kitforge.foundation.errors import ConfigError


@final
class CacheManager:
    """One thread plans at a time, under `lock`; whoever else wants to touch the tiers takes it as well.

    A row leaves only when every lookup that needs it is done (`PinRegistry.done`). When too few can leave, planning
    waits; when waiting would be in vain, the device tier grows for a while. No lookup is ever left without its rows.
    """

    def __init__(
        self, options: CachedEmbeddingOptions, device: DeviceTier, hierarchy: TierHierarchy, counts: TableCounters
    ) -> None:
        self.lock = threading.RLock()
        self.pins = PinRegistry()
        self.device, self.hierarchy = device, hierarchy
        self.counts = counts
        self.policy: EvictionPolicy = build_policy(options.policy, device.index)
        self._fails_on_overflow = options.fail_on_overflow
        # Where nothing has to leave, there is nothing to pin.
        self.holds_all_rows = hierarchy.is_empty
        # Slots of rows that began here, some of which have moved since or are gone.
        self._fresh: list[Tensor] = []
        self._pinned_mask = torch.zeros(0, dtype=torch.bool)  # by slot; false between calls
        self._width = device.width
        self._scratch = Workspace()

    def ensure_resident(self, number: int, keys: Tensor) -> Tensor:
        """Have the rows of distinct `keys` in the device tier until lookup `number` is closed; their slots [u]."""
        with self.lock:
            self.counts.events["lookups"] += 1
            return self._resident_unbounded(keys) if self.holds_all_rows else self._resident_bounded(number, keys)

    def is_pinned(self, slots: Tensor, planned: Tensor) -> Tensor:
        """Which of these slots [n] an open lookup needs, or that which is being planned, of the slots `planned`: a mask
        [n]. Only under `lock`."""
        if len(self._pinned_mask) < self.device.index.room:
            self._pinned_mask = torch.zeros(self.device.index.room, dtype=torch.bool)
        pinned = [planned, *(handle.slots for handle in self.pins.open_lookups())]
        for each in pinned:
            put(self._pinned_mask, each, True)
        result = at(self._pinned_mask, slots)
        for each in pinned:
            put(self._pinned_mask, each, False)
        return result

    def mark_fresh(self, slots: Tensor) -> None:
        """The rows at these slots are as rows begin, and go when nobody needs them unless they move before."""
        put(self.device.is_fresh, slots, True)
        self._fresh.append(slots)

    def clear(self) -> None:
        """Know of no row, when the tiers hold none."""
        put(self.device.is_fresh, torch.cat([*self._fresh, torch.empty(0, dtype=torch.int64)]), False)
        self._fresh = []

    def require_idle(self) -> None:
        """Raise where lookups are still open, whose rows must stay."""
        if self.pins.num_open:
            raise ConfigError(
                "the rows of a table cannot be replaced while batches are on their way",
                got=f"{self.pins.num_open} open lookups",
                fix="end the loop over `prefetch` first, and call step or clear_gradients",
            )

    def _resident_unbounded(self, keys: Tensor) -> Tensor:
        slots = self.device.index.lookup(keys)
        missing = where(slots < 0)
        if len(missing):
            self._evict_fresh(at(slots, where(slots >= 0)))
            put(slots, missing, self._fetch_missing(at(keys, missing)))
        self.counts.count_hits("device", len(keys) - len(missing))
        return slots

    def _resident_bounded(self, number: int, keys: Tensor) -> Tensor:
        device = self.device
        slots = device.index.find(keys)
        self._check_overflow(len(keys))
        missing, here = where(torch.from_numpy(slots.numpy() < 0)), slots.numpy().copy()
        # Pinned before anybody is chosen to leave. To name one once more is quicker than to leave the missing out.
        here[missing.numpy()] = here.max(initial=-1)
        if len(missing) < len(slots):
            device.index.touch(torch.from_numpy(here), number)
        self.counts.count_hits("device", len(keys) - len(missing))
        if len(missing) or device.num_overflow:
            arriving = at(slots, missing)
            self._make_room(number, arriving, at(slots, where(slots >= 0)))
            left = where(arriving < 0)
            if len(left):
                brought = self._fetch_missing(at(keys, at(missing, left)))
                device.index.touch(brought, number)
                put(arriving, left, brought)
            self.policy.on_insert(arriving, number, partial(device.update_counts, arriving))
            put(slots, missing, arriving)
        self.policy.on_access(slots, number)
        return slots

    def _fetch_missing(self, keys: Tensor) -> Tensor:
        self.device.make_room(len(keys))
        rows = self._scratch.take("coming", len(keys), self._width)
        dirty, new = self.hierarchy.fetch(keys, rows)
        slots = self.device.insert(keys, rows, dirty)
        if len(new):
            self.mark_fresh(at(slots, new))
        return slots

    def _make_room(self, number: int, arriving: Tensor, planned: Tensor) -> None:
        """Let rows leave until those that arrive fit into the capacity, as far as that is possible.

        `arriving` [n] says where they are now (`SlotTable.find`). One that is in the host tier takes the slot of one
        that leaves, which is then written there. `planned`: slots of rows of this lookup that are here already.
        """
        device = self.device
        in_host, num_new = where(arriving < -1), len(arriving)
        self._evict_fresh(planned)
        short = self._num_missing_slots(num_new)
        while short > 0:
            done = self.pins.done
            victims = self.policy.victims(short, partial(self._is_evictable, done=done))
            if len(victims):
                self.counts.events["evicted"] += len(victims)
                short -= len(victims)
                coming, in_host = in_host[: len(victims)], in_host[len(victims) :]
                self.hierarchy.exchange(device, victims[: len(coming)], encode_other_tier(at(arriving, coming)))
                # Pinned before anybody else is chosen to leave.
                device.index.touch(victims[: len(coming)], number)
                put(arriving, coming, victims[: len(coming)])
                if len(victims) > len(coming):
                    self.hierarchy.put(*device.evict(victims[len(coming) :]))
            if short > 0 and (not num_new or not self._wait_beyond(done)):
                break
            short -= self._evict_fresh(planned)
        self.counts.events["overflow_rows"] += min(short, num_new) if short > 0 else 0

    def _num_missing_slots(self, num_new: int) -> int:
        capacity = self.device.capacity
        return 0 if capacity is None else len(self.device) + num_new - capacity

    def _is_evictable(self, slots: Tensor, done: int) -> Tensor:
        need = at(self.device.last_use, slots).numpy()
        return torch.from_numpy((need != NEVER_USED) & (need <= done))

    def _wait_beyond(self, done: int) -> bool:
        if self.pins.done > done:
            return True
        self.counts.events["waits"] += 1
        return self.pins.wait_until_done_after(done)

    def _evict_fresh(self, planned: Tensor) -> int:
        """Rows that began here and have not moved are as they would begin again, so they need no place when nobody
        needs them: unseen ids of an evaluation, ids without admission. How many went."""
        if not self._fresh:
            return 0
        slots, device = torch.cat(self._fresh), self.device
        # Asked first: a lookup that is done by then has said which of its rows moved.
        is_needed = self.is_pinned(slots, planned)
        is_fresh = at(device.is_fresh, slots)
        going = torch.from_numpy(np.unique(at(slots, where(is_fresh & ~is_needed)).numpy()))
        kept = at(slots, where(is_fresh & is_needed))
        self._fresh = [kept] if len(kept) else []
        put(device.is_fresh, going, False)
        device.index.remove(going)
        return len(going)

    def _check_overflow(self, num_rows: int) -> None:
        capacity = self.device.capacity
        if self._fails_on_overflow and capacity is not None and num_rows > capacity:
            raise ConfigError(
                "a batch has more distinct rows than the device tier",
                got=f"{num_rows} rows in one lookup, cache.device_rows={capacity}",
                expected=f"cache.device_rows of at least {num_rows}",
                fix=f"cache.device_rows={num_rows}, or cache.fail_on_overflow=false to let the tier grow",
            )
