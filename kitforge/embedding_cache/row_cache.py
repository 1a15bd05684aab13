"""The rows of one table that live on this rank: their tiers, who plans with them, and how they move in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.places import put
from kitforge.core.kernels.scratch import Scratch
from kitforge.core.kernels.threads import beside
from kitforge.core.optim.sparse import RowOptimizer
from kitforge.embedding_cache.admission import Admission
from kitforge.embedding_cache.delta_tracker import DeltaTracker
from kitforge.embedding_cache.forgetting import Forgetting
from kitforge.embedding_cache.gradients import Part
from kitforge.embedding_cache.options import TableOptions
from kitforge.embedding_cache.planner import Planner
from kitforge.embedding_cache.query import check_range
from kitforge.embedding_cache.records import InitialRecords, TableConfig
from kitforge.embedding_cache.spread import Spread
from kitforge.embedding_cache.stats import Counts, TableStats
from kitforge.embedding_cache.tickets import Register, Ticket
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.ladder import build_ladder
from kitforge.embedding_cache.watchers import Watchers

# How many learning rates there is room for at first, where rows that rest have to be told of them.
FIRST_RATES = 1024


@final
class RowCache:
    """Rows in tiers. Values change in `catch_up`, `update` and `forget` alone, which the training thread calls."""

    def __init__(self, options: TableOptions, optimizer: RowOptimizer, spread: Spread | None) -> None:
        self.options, self.optimizer = options, optimizer
        self._spread = spread
        self.config = TableConfig(
            name=options.name, dim=options.dim, seed=options.seed, initial=options.initial, spread=options.spread
        )
        self.initial = InitialRecords(self.config, optimizer, None if spread is None else spread.columns)
        self.layout = self.initial.layout
        self.counts = Counts()
        self.device = DeviceTier(self.layout.width, options.device_rows, options.device)
        kernels = select_table()  # of ids, which are in main memory wherever the device is
        self._unique = kernels.unique
        self.admission = Admission(options.admission, kernels.hash_map, options.seed, options.name)
        place = 0 if spread is None else spread.place
        self.ladder = build_ladder(options, self.initial, self.device, self.counts, place)
        self.planner = Planner(options, self.device, self.ladder, self.counts)
        self.num_steps = 0
        self.rates = torch.zeros(FIRST_RATES if optimizer.moves_untouched_rows else 0, dtype=torch.float64)
        self.watchers = Watchers()
        self.deltas = DeltaTracker()
        self.forgetting = Forgetting(options.forgetting, self.planner, self.initial, self.watchers)
        self._scratches = {True: Scratch(), False: Scratch()}
        # Where all ranks hold all rows, all are told of all lookups if more than gradients changes what is known of a
        # row: if admission counts, or if rows that move while they rest are forgotten by how far they have come.
        by_lookups = not self.admission.admits_all or (options.forgetting.every and optimizer.moves_untouched_rows)
        self._is_told = spread is not None and spread.is_replicated and bool(by_lookups)

    @property
    def register(self) -> Register:
        """The open lookups."""
        return self.planner.register

    def plan(
        self,
        ids: Tensor,
        *,
        ahead: bool,
        is_told: bool = False,
        keep: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Have the rows of ids [N] in the device tier until the ticket is closed.

        `ahead`: another thread than the training's asks for it; then `keep` gets the ticket before any row of it can
        leave. `is_told`: all ranks have these very ids. Raises DataError for an id that cannot be.
        """
        with beside() if ahead else nullcontext():
            return self._plan(ids, ahead, is_told, keep)

    def _plan(self, ids: Tensor, ahead: bool, is_told: bool, keep: Callable[[Ticket], None] | None) -> Ticket:
        distinct, inverse = self._unique(ids, scratch=self._scratches[ahead])
        check_range(distinct, self.options.num_embeddings, self.options.name)
        if self._is_told and not is_told:
            assert self._spread is not None
            own, distinct = distinct, self._spread.together(distinct, ahead)
            inverse = torch.searchsorted(distinct, own)[inverse]
        route = None if self._spread is None else self._spread.route(distinct, ahead)
        keys = distinct if route is None else route.ids
        # Numbers are in the order in which rows are pinned by them, whoever plans.
        with self.planner.lock if ahead else self.interrupt():
            number = self.register.next_number()
            if ahead:
                self.planner.policy.met()
            try:
                slots = self.planner.place(number, keys)
            except BaseException:
                self.register.close(number)
                raise
            ticket = Ticket(number=number, keys=keys, slots=slots, inverse=inverse, route=route)
            self.register.issue(ticket)
            if keep is not None:
                keep(ticket)
        return ticket

    @property
    def is_joint(self) -> bool:
        """Whether planning is something that ranks do together."""
        return self._spread is not None and (self._is_told or not self._spread.is_replicated)

    def expect(self, ids: Tensor) -> None:
        """A lookup of these ids [N] will be planned ahead later."""
        self.planner.policy.expect(self._unique(ids, scratch=self._scratches[True])[0])

    def admit(self, ticket: Ticket, *, is_counted: bool) -> None:
        """When a lookup is computed: say which of its rows take gradients. `is_counted`: it is one of the training."""
        if self.admission.admits_all:
            return
        ticket.trains = self.admission.observe(ticket.keys) if is_counted else self.admission.admitted(ticket.keys)
        self.counts.events["guests"] += len(ticket.keys) - int(ticket.trains.sum())

    @contextmanager
    def interrupt(self) -> Iterator[None]:
        """Within the block nobody else plans, and no row moves between tiers."""
        with self.register.waiting(), self.planner.lock:
            yield

    @torch.no_grad()
    def catch_up(self, slots: Tensor) -> None:
        """Before rows are read: let those that rested move as far as all steps so far move them."""
        if not self.optimizer.moves_untouched_rows or not self.num_steps or not len(slots):
            return
        with self.device.using() as slab:
            self._before_change(slots)
            there = self.device.there(slots)
            self.optimizer.catch_up(slab, there, self.num_steps, self.rates)
            has_moved = self.layout.whole(slab)[:, self.layout.updates][there] > 0
            self.device.is_dirty[slots] |= has_moved.cpu()

    @torch.no_grad()
    def update(self, part: Part | None, rate: float) -> None:
        """One step: move the rows of `part`, whose lookups are still open."""
        if part is not None:
            self.catch_up(part.slots)
        if self.optimizer.moves_untouched_rows:
            self._keep_rate(rate)
        self.num_steps += 1
        if part is None or not len(part.slots):
            return
        with self.device.using() as slab:
            self._before_change(part.slots)
            there = self.device.there(part.slots)
            self.optimizer.update(slab, there, part.gradients, rate, self.num_steps)
            put(self.device.is_dirty, part.slots, True)
            put(self.device.is_guest, part.slots, False)
            if self.forgetting.has_buckets:
                is_first = self.layout.whole(slab)[:, self.layout.updates][there].cpu() == 1
                keys = self.device.index.keys_at(part.slots[is_first])
                self.forgetting.changed(keys, torch.full((len(keys),), self.num_steps), self.num_steps)

    @torch.no_grad()
    def forget(self) -> None:
        """At the end of a step: let go of the rows that are to be forgotten, if it is time."""
        if self.forgetting.is_due(self.num_steps):
            with self.interrupt():
                gone = self.forgetting.run(self.num_steps)
            self.deltas.remove(gone)
            self.admission.forget(gone)
            self.counts.events["forgotten"] += len(gone)

    def state(self) -> dict[str, Tensor]:
        """What belongs to no row: the number of steps, that of admission, and rates where rows that rest need them."""
        state = {"steps": torch.tensor(self.num_steps)}
        state |= {} if self.admission.admits_all else {"admission": torch.tensor(self.admission.step)}
        return state | ({"rates": self.rates[: self.num_steps].clone()} if self.optimizer.moves_untouched_rows else {})

    def clear(self) -> None:
        """Let go of all rows and counts, while nobody plans."""
        self.device.index.remove(self.device.index.used())
        self.ladder.clear()
        self.planner.clear()
        self.admission.clear()
        self.deltas.restart(None)
        self.forgetting.clear()

    def lay_down(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows in, in place of those that may be there, while nobody plans."""
        if self.forgetting.has_buckets:
            counters = self.layout.whole(rows)
            has_moved = counters[:, self.layout.updates] > 0
            last_steps = counters[has_moved][:, self.layout.last_step]
            self.forgetting.changed(keys[has_moved], last_steps, self.num_steps)
        if not self.ladder.is_empty:
            self.ladder.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))
            return
        self.device.index.take(keys)
        self.device.make_room(len(keys))
        self.device.bring(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def peek(self, keys: Tensor, out: Tensor) -> None:
        """Copy rows as they are or begin, while nobody plans."""
        self.initial.fill(keys, out)
        self.ladder.peek_store(keys, out)
        self.ladder.peek_host(keys, out)
        slots = self.device.index.lookup(keys)
        here = slots >= 0
        out[here] = self.device.rows(slots[here])

    def stats(self) -> TableStats:
        """What was counted so far."""
        with self.interrupt():
            return self.counts.stats({"device": len(self.device)} | self.ladder.num_rows())

    def close(self) -> None:
        """Let go of threads, files and connections."""
        self.ladder.close()

    def _before_change(self, slots: Tensor) -> None:
        if self.watchers or self.deltas.is_on:
            keys = self.device.index.keys_at(slots)
            self.deltas.change(keys)
            self.watchers.before_change(keys, lambda places: self.device.rows(slots[places]))

    def _keep_rate(self, rate: float) -> None:
        if self.num_steps == len(self.rates):
            self.rates = torch.cat([self.rates, torch.zeros_like(self.rates)])
        self.rates[self.num_steps] = rate
