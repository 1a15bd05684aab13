"""The planning thread's part: decides which rows of a lookup live where, and moves them. It never reads a value.

Legend: u distinct keys of a lookup.
"""

import threading
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.tables.indexing import at, put, where
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.embedding_cache.eviction.policy import build_policy
from kitforge.embedding_cache.keys.row_init import RowInitializer
from kitforge.embedding_cache.keys.slot_map import NEVER_USED, flip_location
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry
from kitforge.embedding_cache.stats import TableCounters
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.two_level import TwoLevelStore
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ConfigError


class CacheManager:
    """One thread plans at a time, under `lock`; other threads that access the tiers take it as well.

    A row is evicted only when every lookup that needs it is done (`PinRegistry.done`). When too few rows are evictable,
    planning waits; when waiting would be a deadlock, the device tier grows for a while. So every lookup gets its rows.
    """

    def __init__(
        self,
        options: CachedEmbeddingOptions,
        device: DeviceTier,
        tiers: TwoLevelStore,
        row_initializer: RowInitializer,
        counts: TableCounters,
    ) -> None:
        self.lock = threading.RLock()
        self.pins = PinRegistry()
        self.device, self.tiers, self.counts = device, tiers, counts
        self.policy = build_policy(options.policy, device.index)
        self._row_initializer, self._fails_on_overflow = row_initializer, options.fail_on_overflow
        # Slots of rows initialized here, some of which were updated or removed since; those of open lookups are there.
        self.fresh: list[Tensor] = []
        self._pinned_mask = torch.zeros(0, dtype=torch.bool)  # by slot; false between calls
        self._copy_rows, self._scratch = select_table().copy_rows, Workspace()

    def ensure_resident(self, number: int, keys: Tensor) -> Tensor:
        """Move the rows of distinct `keys` to the device tier until lookup `number` is closed; their slots [u]."""
        with self.lock:
            self.counts.events["lookups"] += 1
            if self.device.capacity is not None:
                return self._resident_bounded(number, keys, self.device.capacity)
            slots = self.device.index.lookup(keys)
            missing = where(slots < 0)
            if len(missing):
                self._drop_fresh(slots)
                put(slots, missing, self._fetch(at(keys, missing)))
            self.counts.hits["device"] += len(keys) - len(missing)
            return slots

    def find_ids(self, handle: LookupHandle, ids: Tensor, bound: int | None) -> int:
        """As `ensure_resident`, for a device that has a key map: plan the lookup of ids [N], which are there, so that
        nothing of them is copied to the CPU but the keys of new rows. Returns the number of ids that are not from 0 to
        below `bound`; then nothing is planned."""
        device = self.device
        assert device.key_map is not None
        with self.lock:
            found = device.key_map.find_distinct(ids, bound)
            if found.num_outside:
                return found.num_outside
            self.counts.events["lookups"] += 1
            if found.num_missing:
                # The host knows how many there are, and does not wait for their positions.
                missing = torch.argsort(found.slots.clamp(max=0), stable=True)[: found.num_missing]
                keys = found.keys.index_select(0, missing).cpu()
                if self.fresh:
                    self._drop_fresh(found.slots.cpu())
                found.slots.index_copy_(0, missing, copy_to(self._fetch(keys), device.device))
            self.counts.hits["device"] += len(found.keys) - found.num_missing
            handle.keys, handle.inverse = found.keys, found.inverse
            handle.slots = handle.device_slots = found.slots
            return 0

    def is_pinned(self, slots: Tensor, planned: Tensor) -> Tensor:
        """The mask [n] of those of these slots [n] that an open lookup needs, or the current one, whose rows so far are
        at the locations `planned`. Only under `lock`."""
        if len(self._pinned_mask) < self.device.index.room:
            self._pinned_mask = torch.zeros(self.device.index.room, dtype=torch.bool)
        pinned = [at(planned, where(planned >= 0)), *[handle.slots.cpu() for handle in self.pins.open_lookups()]]
        mask = self._pinned_mask.numpy()
        for each in pinned:
            mask[each.numpy()] = True
        result = mask[slots.numpy()]
        for each in pinned:
            mask[each.numpy()] = False
        return torch.from_numpy(result)

    def mark_fresh(self, slots: Tensor) -> None:
        """The rows at these slots are initial rows. They are dropped when no lookup needs them, unless updated."""
        self.device.mark_fresh(slots, True)
        self.fresh.append(slots)

    def clear(self) -> None:
        """Forget the fresh rows, when the tiers are empty."""
        self.device.mark_fresh(torch.cat([*self.fresh, torch.empty(0, dtype=torch.int64)]), False)
        self.fresh = []

    def _resident_bounded(self, number: int, keys: Tensor, capacity: int) -> Tensor:
        device = self.device
        if self._fails_on_overflow and len(keys) > capacity:
            raise ConfigError(
                "a batch has more distinct rows than the device tier",
                got=f"{len(keys)} rows in one lookup, cache.device_rows={capacity}",
                expected=f"cache.device_rows of at least {len(keys)}",
                fix=f"cache.device_rows={len(keys)}, or fail_on_overflow=False to let the tier grow",
            )
        # Hits are pinned before victims are chosen.
        slots = device.index.find_and_touch(keys, number)
        missing = where(torch.from_numpy(slots.numpy() < 0))
        self.counts.hits["device"] += len(keys) - len(missing)
        if len(missing) or len(device.index) > capacity:
            arriving = at(slots, missing)
            self._make_room(number, arriving, slots, capacity)
            left = where(arriving < 0)
            if len(left):
                inserted = self._fetch(at(keys, at(missing, left)))
                device.index.touch(inserted, number)
                put(arriving, left, inserted)
            self.policy.on_insert(arriving, number, partial(self._update_counts, arriving))
            put(slots, missing, arriving)
        self.policy.on_access(slots, number)
        return slots

    def _update_counts(self, slots: Tensor) -> Tensor:
        counts = self.device.slab.view(torch.int32)[:, self._row_initializer.layout.updates]
        return counts.index_select(0, slots.to(self.device.device)).cpu()

    def _fetch(self, keys: Tensor) -> Tensor:
        """Insert the rows of these keys into the device tier, from the tiers below or initialized; their slots."""
        self.device.make_room(len(keys))
        rows = self._scratch.take("coming", len(keys), self.device.width)
        dirty, new = self.tiers.fetch(keys, rows)
        if len(new) == len(keys):
            self._row_initializer.fill(keys, rows)
        elif len(new):
            initial = torch.empty(len(new), self.device.width)
            self._row_initializer.fill(at(keys, new), initial)
            self._copy_rows(initial, rows, to=new)
        self.counts.hits["new"] += len(new)
        slots = self.device.insert(keys, rows, dirty)
        if len(new):
            self.mark_fresh(at(slots, new))
        return slots

    def _make_room(self, number: int, arriving: Tensor, planned: Tensor, capacity: int) -> None:
        """Evict rows until the arriving ones fit into the capacity, as far as that is possible.

        `arriving` [n] holds their locations (`SlotMap.find`). A row of the host tier takes the slot of a victim, which
        is then written there. `planned` [u]: the locations of all rows of this lookup.
        """
        device = self.device
        in_host, num_new = where(arriving < -1), len(arriving)
        self._drop_fresh(planned)
        short = len(device.index) + num_new - capacity
        while short > 0:
            done = self.pins.done
            victims = self.policy.victims(short, partial(self._is_evictable, done=done))
            if len(victims):
                self.counts.events["evicted"] += len(victims)
                short -= len(victims)
                coming, in_host = in_host[: len(victims)], in_host[len(victims) :]
                if len(coming):
                    host = self.tiers.upper
                    assert isinstance(host, HostStore)
                    host.exchange(flip_location(at(arriving, coming)), device, victims[: len(coming)])
                    self.counts.hits["host"] += len(coming)
                    self.counts.moved["host"] += len(coming)
                    # Pin the rows that came before choosing more victims.
                    device.index.touch(victims[: len(coming)], number)
                    put(arriving, coming, victims[: len(coming)])
                if len(victims) > len(coming):
                    self.tiers.put(*device.evict(victims[len(coming) :]))
            if short > 0 and (not num_new or not self._wait_beyond(done)):
                break
            short -= self._drop_fresh(planned)
        self.counts.events["overflow_rows"] += min(short, num_new) if short > 0 else 0

    def _is_evictable(self, slots: Tensor, done: int) -> Tensor:
        last_use = self.device.index.last_use.numpy()[slots.numpy()]
        return torch.from_numpy((last_use != NEVER_USED) & (last_use <= done))

    def _wait_beyond(self, done: int) -> bool:
        if self.pins.done > done:
            return True
        self.counts.events["waits"] += 1
        return self.pins.wait_until_done_after(done)

    def _drop_fresh(self, planned: Tensor) -> int:
        """Drop initial rows that were never updated and that no lookup needs: unseen ids of an evaluation, ids without
        admission. They would be initialized alike again. Returns their number."""
        if not self.fresh:
            return 0
        slots, device = torch.cat(self.fresh), self.device
        # Pins are read before the flags: a lookup that is done by then has cleared the flags of rows it updated.
        is_needed = self.is_pinned(slots, planned)
        is_fresh = device.are_fresh(slots)
        going = torch.from_numpy(np.unique(at(slots, where(is_fresh & ~is_needed)).numpy()))
        kept = at(slots, where(is_fresh & is_needed))
        self.fresh = [kept] if len(kept) else []
        device.mark_fresh(going, False)
        device.index.remove(going)
        return len(going)
