"""The rows of one table that live on this rank: their tiers, who plans with them, and how they move in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.indexing import put
from kitforge.core.kernels.threads import reserve_threads
from kitforge.core.kernels.workspace import Workspace
from kitforge.core.optim.row_optimizers import RowOptimizer
from kitforge.embedding_cache.admission import Admission
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.copy_on_write import WriteObservers
from kitforge.embedding_cache.delta_tracker import DeltaTracker
from kitforge.embedding_cache.expiry import RowExpiry
from kitforge.embedding_cache.gradients import SlotGradients
from kitforge.embedding_cache.lookup_input import check_range
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry
from kitforge.embedding_cache.row_init import RowInitConfig, RowInitializer
from kitforge.embedding_cache.sharding.strategies import TableSharding
from kitforge.embedding_cache.stats import TableCounters, TableStats
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.hierarchy import build_hierarchy

# How many learning rates there is room for at first, where rows that rest have to be told of them.
INITIAL_RATES = 1024


@final
class RowCache:
    """Rows in tiers. Values change in `catch_up`, `update` and `forget` alone, which the training thread calls."""

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
        self.counts = TableCounters()
        self.device = DeviceTier(self.layout.width, options.device_rows, options.device)
        kernels = select_table()  # of ids, which are in main memory wherever the device is
        self._unique = kernels.unique
        self.admission = Admission(options.admission, kernels.hash_map, options.seed, options.name)
        rank = 0 if sharding is None else sharding.rank
        self.hierarchy = build_hierarchy(options, self.row_initializer, self.device, self.counts, rank)
        self.manager = CacheManager(options, self.device, self.hierarchy, self.counts)
        self.num_steps = 0
        self.rates = torch.zeros(INITIAL_RATES if optimizer.moves_untouched_rows else 0, dtype=torch.float64)
        self.write_observers = WriteObservers()
        self.deltas = DeltaTracker()
        self.expiry = RowExpiry(options.expiry, self.manager, self.row_initializer, self.write_observers)
        self._scratches = {True: Workspace(), False: Workspace()}
        # Where all ranks hold all rows, all are told of all lookups if more than gradients changes what is known of a
        # row: if admission counts, or if rows that move while they rest are forgotten by how far they have come.
        by_lookups = not self.admission.admits_all or (options.expiry.every and optimizer.moves_untouched_rows)
        self._gathers_lookups = sharding is not None and sharding.is_replicated and bool(by_lookups)

    @property
    def pins(self) -> PinRegistry:
        """The open lookups."""
        return self.manager.pins

    def plan(
        self,
        ids: Tensor,
        *,
        ahead: bool,
        is_gathered: bool = False,
        keep: Callable[[LookupHandle], None] | None = None,
    ) -> LookupHandle:
        """Have the rows of ids [N] in the device tier until the ticket is closed.

        `ahead`: another thread than the training's asks for it; then `keep` gets the ticket before any row of it can
        leave. `is_told`: all ranks have these very ids. Raises DataError for an id that cannot be.
        """
        with reserve_threads() if ahead else nullcontext():
            return self._plan(ids, ahead, is_gathered, keep)

    def _plan(
        self, ids: Tensor, ahead: bool, is_gathered: bool, keep: Callable[[LookupHandle], None] | None
    ) -> LookupHandle:
        distinct, inverse = self._unique(ids, scratch=self._scratches[ahead])
        check_range(distinct, self.options.num_embeddings, self.options.name)
        if self._gathers_lookups and not is_gathered:
            assert self._sharding is not None
            own, distinct = distinct, self._sharding.all_gather_keys(distinct, ahead)
            inverse = torch.searchsorted(distinct, own)[inverse]
        route = None if self._sharding is None else self._sharding.plan_exchange(distinct, ahead)
        keys = distinct if route is None else route.ids
        # Numbers are in the order in which rows are pinned by them, whoever plans.
        with self.manager.lock if ahead else self.exclusive():
            number = self.pins.next_number()
            if ahead:
                self.manager.policy.on_planned()
            try:
                slots = self.manager.ensure_resident(number, keys)
            except BaseException:
                self.pins.close(number)
                raise
            handle = LookupHandle(number=number, keys=keys, slots=slots, inverse=inverse, exchange=route)
            self.pins.pin(handle)
            if keep is not None:
                keep(handle)
        return handle

    @property
    def is_collective(self) -> bool:
        """Whether planning is something that ranks do together."""
        return self._sharding is not None and (self._gathers_lookups or not self._sharding.is_replicated)

    def on_future_access(self, ids: Tensor) -> None:
        """A lookup of these ids [N] will be planned ahead later."""
        self.manager.policy.on_future_access(self._unique(ids, scratch=self._scratches[True])[0])

    def admit(self, handle: LookupHandle, *, is_counted: bool) -> None:
        """When a lookup is computed: say which of its rows take gradients. `is_counted`: it is one of the training."""
        if self.admission.admits_all:
            return
        handle.is_trained = (
            self.admission.count_step(handle.keys) if is_counted else self.admission.is_admitted(handle.keys)
        )
        self.counts.events["unadmitted"] += len(handle.keys) - int(handle.is_trained.sum())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within the block nobody else plans, and no row moves between tiers."""
        with self.pins.trainer_waiting(), self.manager.lock:
            yield

    @torch.no_grad()
    def catch_up(self, slots: Tensor) -> None:
        """Before rows are read: let those that rested move as far as all steps so far move them."""
        if not self.optimizer.moves_untouched_rows or not self.num_steps or not len(slots):
            return
        with self.device.using() as slab:
            self._before_change(slots)
            there = self.device.to_device(slots)
            self.optimizer.catch_up(slab, there, self.num_steps, self.rates)
            has_moved = self.layout.as_integers(slab)[:, self.layout.updates][there] > 0
            self.device.is_dirty[slots] |= has_moved.cpu()

    @torch.no_grad()
    def update(self, part: SlotGradients | None, rate: float) -> None:
        """One step: move the rows of `part`, whose lookups are still open."""
        if part is not None:
            self.catch_up(part.slots)
        if self.optimizer.moves_untouched_rows:
            self._record_rate(rate)
        self.num_steps += 1
        if part is None or not len(part.slots):
            return
        with self.device.using() as slab:
            self._before_change(part.slots)
            there = self.device.to_device(part.slots)
            self.optimizer.update(slab, there, part.gradients, rate, self.num_steps)
            put(self.device.is_dirty, part.slots, True)
            put(self.device.is_fresh, part.slots, False)
            if self.expiry.has_buckets:
                is_first = self.layout.as_integers(slab)[:, self.layout.updates][there].cpu() == 1
                keys = self.device.index.keys_at(part.slots[is_first])
                self.expiry.changed(keys, torch.full((len(keys),), self.num_steps), self.num_steps)

    @torch.no_grad()
    def expire(self) -> None:
        """At the end of a step: let go of the rows that are to be forgotten, if it is time."""
        if self.expiry.is_due(self.num_steps):
            with self.exclusive():
                gone = self.expiry.run(self.num_steps)
            self.deltas.mark_removed(gone)
            self.admission.remove(gone)
            self.counts.events["expired"] += len(gone)

    def state(self) -> dict[str, Tensor]:
        """What belongs to no row: the number of steps, that of admission, and rates where rows that rest need them."""
        state = {"steps": torch.tensor(self.num_steps)}
        state |= {} if self.admission.admits_all else {"admission": torch.tensor(self.admission.step)}
        return state | ({"rates": self.rates[: self.num_steps].clone()} if self.optimizer.moves_untouched_rows else {})

    def clear(self) -> None:
        """Let go of all rows and counts, while nobody plans."""
        self.device.index.remove(self.device.index.used())
        self.hierarchy.clear()
        self.manager.clear()
        self.admission.clear()
        self.deltas.restart(None)
        self.expiry.clear()

    def insert_rows(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in, in place of those that may be there, while nobody plans."""
        if self.expiry.has_buckets:
            counters = self.layout.as_integers(rows)
            has_moved = counters[:, self.layout.updates] > 0
            last_steps = counters[has_moved][:, self.layout.last_step]
            self.expiry.changed(keys[has_moved], last_steps, self.num_steps)
        if not self.hierarchy.is_empty:
            self.hierarchy.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))
            return
        self.device.index.pop(keys)
        self.device.make_room(len(keys))
        self.device.insert(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def peek(self, keys: Tensor, out: Tensor) -> None:
        """Copy rows as they are or begin, while nobody plans."""
        self.row_initializer.fill(keys, out)
        self.hierarchy.peek_store(keys, out)
        self.hierarchy.peek_host(keys, out)
        slots = self.device.index.lookup(keys)
        here = slots >= 0
        out[here] = self.device.rows(slots[here])

    def stats(self) -> TableStats:
        """What was counted so far."""
        with self.exclusive():
            return self.counts.stats({"device": len(self.device)} | self.hierarchy.num_rows())

    def close(self) -> None:
        """Let go of threads, files and connections."""
        self.hierarchy.close()

    def _before_change(self, slots: Tensor) -> None:
        if self.write_observers or self.deltas.is_on:
            keys = self.device.index.keys_at(slots)
            self.deltas.mark_changed(keys)
            self.write_observers.before_change(keys, lambda positions: self.device.rows(slots[positions]))

    def _record_rate(self, rate: float) -> None:
        if self.num_steps == len(self.rates):
            self.rates = torch.cat([self.rates, torch.zeros_like(self.rates)])
        self.rates[self.num_steps] = rate
