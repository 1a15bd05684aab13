"""The rows of one table on this rank: plans lookups, and updates rows in a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.threads import reserve_threads
from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.hash_map.reference import DictHashMap
from kitforge.core.kernels.tables.indexing import put
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.optim.row_optimizers import RowOptimizer
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.changes import ChangeTracker
from kitforge.embedding_cache.expiry import RowExpiry
from kitforge.embedding_cache.keys.admission import Admission
from kitforge.embedding_cache.keys.row_init import RowInitConfig, RowInitializer
from kitforge.embedding_cache.lookup import SlotGradients, check_range, flat_ids
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.pins import LookupHandle, PrefetchedLookups
from kitforge.embedding_cache.sharding.replicated import Replicated
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.stats import TableCounters, TableStats
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.two_level import build_tiers
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ConfigError

# Learning rates that there is room for at first, for optimizers that also move rows without a gradient.
INITIAL_RATES = 1024
# From so many ids on, an accelerator finds the distinct ones sooner, though the host waits for them.
DEVICE_IDS = 32_768


class RowCache:
    """Rows in tiers. Only the training thread changes values: in `catch_up`, `update` and `expire`."""

    def __init__(
        self, options: CachedEmbeddingOptions, optimizer: RowOptimizer, sharding: TableSharding | None
    ) -> None:
        self.options, self.optimizer = options, optimizer
        self._sharding = sharding
        self.config = RowInitConfig(
            name=options.name,
            dim=options.dim,
            seed=options.seed,
            initial=options.initial,
            init_scale=options.init_scale,
        )
        self.row_initializer = RowInitializer(self.config, optimizer, None if sharding is None else sharding.columns)
        self.layout = self.row_initializer.layout
        self._counts = TableCounters()
        has_key_map = plans_on_device(options, sharding)
        self.device = DeviceTier(self.layout.width, options.device_rows, options.device, has_key_map=has_key_map)
        kernels = select_table()  # of ids, which are in main memory wherever the device is
        self._unique = kernels.unique
        self.admission = Admission(options.admission, kernels.hash_map, options.seed, options.name)
        rank = 0 if sharding is None else sharding.rank
        self.tiers = build_tiers(options, self.layout.width, self.device, self._counts, rank)
        self.manager = CacheManager(options, self.device, self.tiers, self.row_initializer, self._counts)
        self.pins = self.manager.pins
        # Its callback runs at any moment, so it only closes the lookup.
        self.prefetched = PrefetchedLookups(self.pins.close)
        self.num_steps = 0
        self.rates = torch.zeros(INITIAL_RATES if optimizer.moves_untouched_rows else 0, dtype=torch.float64)
        self.changes = ChangeTracker()
        self.expiry = RowExpiry(options.expiry, self.manager, self.row_initializer, self.changes)
        self._scratches = {True: Workspace(), False: Workspace()}
        # With replicas, every rank must see the lookups of all ranks if lookups change the state of rows: if admission
        # counts them, or if rows without a gradient move and expire by their norm.
        by_lookups = not self.admission.admits_all or (options.expiry.every and optimizer.moves_untouched_rows)
        self._replicas = sharding if isinstance(sharding, Replicated) and by_lookups else None
        self._finds_there = self.device.device.type != "cpu" and self._replicas is None
        # Whether planning is a collective of the ranks.
        is_exchanged = sharding is not None and not isinstance(sharding, Replicated)
        self.is_collective = is_exchanged or self._replicas is not None

    def plan(
        self, ids: Tensor, *, ahead: bool, is_gathered: bool = False, keep: Callable[[LookupHandle], None] | None = None
    ) -> LookupHandle:
        """Keep the rows of ids [N] in the device tier until the lookup is closed.

        `ahead`: the prefetch thread plans; `keep` then gets the lookup before any of its rows can be evicted.
        `is_gathered`: all ranks have these same ids. Raises DataError for an id outside the table.
        """
        with reserve_threads() if ahead else nullcontext():
            if self.device.key_map is not None:
                ids = copy_to(ids, self.device.device)
                handle = LookupHandle(keys=ids[:0], inverse=ids[:0], exchange=None)
            else:
                handle = self._distinct_ids(ids, ahead=ahead, is_gathered=is_gathered)
            # Lookups are numbered in the order in which rows are pinned by them, whichever thread plans.
            with self.manager.lock if ahead else self.exclusive():
                self.pins.open(handle)
                if ahead and self.manager.policy.future:
                    self.manager.policy.future.popleft()
                try:
                    if self.device.key_map is None:
                        handle.slots = self.manager.ensure_resident(handle.number, handle.keys)
                        handle.device_slots = copy_to(handle.slots, self.device.device)
                    elif self.manager.find_ids(handle, ids, self.options.num_embeddings):
                        check_range(ids, self.options.num_embeddings, self.options.name)
                except BaseException:
                    self.pins.close(handle.number)
                    raise
                if keep is not None:
                    keep(handle)
            return handle

    def _distinct_ids(self, ids: Tensor, *, ahead: bool, is_gathered: bool) -> LookupHandle:
        """A lookup without slots: its keys are those that this process needs rows of."""
        if self._finds_there and len(ids) >= DEVICE_IDS:
            distinct, inverse = self.device.kernels.unique(copy_to(ids, self.device.device))
            distinct = distinct.cpu()
        else:
            distinct, inverse = self._unique(ids.cpu(), scratch=self._scratches[ahead])
        check_range(distinct, self.options.num_embeddings, self.options.name)
        if self._replicas is not None and not is_gathered:
            own, distinct = distinct, self._replicas.all_gather_keys(distinct, ahead)
            inverse = torch.searchsorted(distinct, own)[inverse]
        route = None if self._sharding is None else self._sharding.plan_exchange(distinct, ahead)
        keys = distinct if route is None else route.ids
        return LookupHandle(keys=keys, inverse=copy_to(inverse, self.device.device), exchange=route)

    def on_future_access(self, ids: Tensor) -> None:
        """The prefetch thread will plan a lookup of these ids later."""
        self.manager.policy.future.append(self._unique(flat_ids(ids).cpu(), scratch=self._scratches[True])[0])

    def prefetch(self, ids: Tensor) -> None:
        """Plan the next lookup of this very tensor; only the prefetch thread calls it."""
        self.plan(flat_ids(ids), ahead=True, keep=partial(self.prefetched.add, ids))

    def admit(self, handle: LookupHandle, *, is_counted: bool) -> None:
        """Decide which rows of a lookup take gradients, when it is computed. `is_counted`: it is a training lookup."""
        if self.admission.admits_all:
            return
        handle.is_trained = self.admission.admit(handle.keys, is_counted=is_counted)
        self._counts.events["unadmitted"] += len(handle.keys) - int(handle.is_trained.sum())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within the block no other thread plans, and no row moves between tiers."""
        with self.pins.trainer_waiting(), self.manager.lock:
            yield

    @torch.no_grad()
    def catch_up(self, slots: Tensor, there: Tensor) -> None:
        """Before rows are read: apply the steps in which they had no gradient, for optimizers that move such rows.
        `there`: the slots on the device of the rows."""
        if not self.optimizer.moves_untouched_rows or not self.num_steps or not len(slots):
            return
        with self.device.slab_lock:
            slab = self.device.slab
            self._before_change(slots)
            self.optimizer.catch_up(slab, there, self.num_steps, self.rates)
            # Without a capacity no row leaves the tier.
            if self.device.capacity is not None:
                has_moved = self.layout.as_integers(slab)[:, self.layout.updates][there] > 0
                self.device.is_dirty[slots] |= has_moved.cpu()

    @torch.no_grad()
    def update(self, part: SlotGradients | None, rate: float) -> None:
        """One optimizer step on the rows of `part`, whose lookups are still open."""
        if self.optimizer.moves_untouched_rows:
            if part is not None:
                self.catch_up(part.slots, part.device_slots)
            if self.num_steps == len(self.rates):
                self.rates = torch.cat([self.rates, torch.zeros_like(self.rates)])
            self.rates[self.num_steps] = rate
        self.num_steps += 1
        if part is None or not len(part.slots):
            return
        with self.device.slab_lock:
            slab, there = self.device.slab, part.device_slots
            self._before_change(part.slots)
            self.optimizer.update(slab, there, part.gradients, rate, self.num_steps)
            if self.device.capacity is not None:
                put(self.device.is_dirty, part.slots, True)
            if self.manager.fresh:
                self.device.mark_fresh(part.slots, False)
            if self.expiry.has_buckets:
                is_first = self.layout.as_integers(slab)[:, self.layout.updates][there].cpu() == 1
                keys = self.device.index.keys_at(part.slots.cpu()[is_first])
                self.expiry.on_update(keys, torch.full((len(keys),), self.num_steps), self.num_steps)

    @torch.no_grad()
    def expire(self) -> None:
        """At the end of a step: delete expired rows, every `expiry.every` steps."""
        every = self.options.expiry.every
        if every and self.num_steps > 0 and self.num_steps % every == 0:
            with self.exclusive():
                gone = self.expiry.run(self.num_steps)
            self.changes.mark_removed(gone)
            self.admission.remove(gone)
            self._counts.events["expired"] += len(gone)

    def state(self) -> dict[str, Tensor]:
        """The state that belongs to no row: step counts, and learning rates for rows without a gradient."""
        state = {"steps": torch.tensor(self.num_steps)}
        if not self.admission.admits_all:
            state["admission"] = torch.tensor(self.admission.step)
        if self.optimizer.moves_untouched_rows:
            state["rates"] = self.rates[: self.num_steps].clone()
        return state

    def clear(self) -> None:
        """Delete all rows and counts, within `exclusive`. Raises ConfigError while lookups are open."""
        if num_open := len(self.pins.open_lookups()):
            raise ConfigError(
                "the rows of a table cannot be replaced while lookups are open",
                got=f"{num_open} open lookups",
                expected="none",
                fix="end the loop over `prefetch` first, and call step or clear_gradients",
            )
        self.device.index.remove(self.device.index.used())
        for store in self.tiers.levels:
            for keys in [keys.clone() for keys, _ in store.scan(2**16)]:
                store.delete(keys)
        self.manager.clear()
        self.admission.clear()
        self.changes.restart(None)
        self.expiry.buckets.clear()

    def insert_rows(self, keys: Tensor, rows: Tensor) -> None:
        """Insert or replace rows, within `exclusive`."""
        if self.expiry.has_buckets:
            counters = self.layout.as_integers(rows)
            has_moved = counters[:, self.layout.updates] > 0
            last_steps = counters[has_moved][:, self.layout.last_step]
            self.expiry.on_update(keys[has_moved], last_steps, self.num_steps)
        dirty = torch.ones(len(keys), dtype=torch.bool)
        if self.tiers.levels:
            self.tiers.put(keys, rows, dirty)
        else:
            self.device.index.pop(keys)
            self.device.make_room(len(keys))
            self.device.insert(keys, rows, dirty)

    def peek(self, keys: Tensor, out: Tensor) -> None:
        """Copy rows into `out` as they are, or as they are initialized, within `exclusive`."""
        self.row_initializer.fill(keys, out)
        self.tiers.read(keys, out)
        slots = self.device.index.lookup(keys)
        here = slots >= 0
        out[here] = self.device.rows(slots[here])

    def stats(self) -> TableStats:
        """The counts so far."""
        with self.exclusive():
            resident = {"device": len(self.device.index)} | self.tiers.num_rows("host")
            return self._counts.stats(self.layout.width, resident)

    def _before_change(self, slots: Tensor) -> None:
        if self.changes.observers or self.changes.since is not None:
            slots = slots.cpu()
            keys = self.device.index.keys_at(slots)
            self.changes.before_change(keys, lambda positions: self.device.rows(slots[positions]))


def plans_on_device(options: CachedEmbeddingOptions, sharding: TableSharding | None) -> bool:
    """Whether lookups are planned on the device of the rows: where all rows are there, every id gets a row, ranks
    exchange no ids, and the device has a hash map of its own."""
    device = torch.device(options.device)
    if device.type == "cpu" or options.device_rows is not None or sharding is not None:
        return False
    return options.admission.name == "always" and select_table(device.type).hash_map is not DictHashMap
