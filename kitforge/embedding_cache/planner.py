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

from kitforge.core.kernels.places import at, put, where
from kitforge.core.kernels.scratch import Scratch
from kitforge.embedding_cache.index import NEVER
from kitforge.embedding_cache.keys import flipped
from kitforge.embedding_cache.options import TableOptions
from kitforge.embedding_cache.policy import EvictionPolicy, build_policy
from kitforge.embedding_cache.stats import Counts
from kitforge.embedding_cache.tickets import Register
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.ladder import Ladder
from kitforge.foundation.errors import ConfigError


@final
class Planner:
    """One thread plans at a time, under `lock`; whoever else wants to touch the tiers takes it as well.

    A row leaves only when every lookup that needs it is done (`Register.done`). When too few can leave, planning waits;
    when waiting would be in vain, the device tier grows for a while. No lookup is ever left without its rows.
    """

    def __init__(self, options: TableOptions, device: DeviceTier, ladder: Ladder, counts: Counts) -> None:
        self.lock = threading.RLock()
        self.register = Register()
        self.device, self.ladder = device, ladder
        self.counts = counts
        self.policy: EvictionPolicy = build_policy(options.policy, device.index)
        self._is_strict = options.strict
        # Where nothing has to leave, there is nothing to pin.
        self.is_whole = ladder.is_empty
        # Slots of rows that began here, some of which have moved since or are gone.
        self._guests: list[Tensor] = []
        self._needed = torch.zeros(0, dtype=torch.bool)  # by slot; false between calls
        self._width = device.width
        self._scratch = Scratch()

    def place(self, number: int, keys: Tensor) -> Tensor:
        """Have the rows of distinct `keys` in the device tier until lookup `number` is closed; their slots [u]."""
        with self.lock:
            self.counts.events["lookups"] += 1
            return self._whole(keys) if self.is_whole else self._pinned(number, keys)

    def needed(self, slots: Tensor, planned: Tensor) -> Tensor:
        """Which of these slots [n] an open lookup needs, or that which is being planned, of the slots `planned`: a mask
        [n]. Only under `lock`."""
        if len(self._needed) < self.device.index.room:
            self._needed = torch.zeros(self.device.index.room, dtype=torch.bool)
        pinned = [planned, *(ticket.slots for ticket in self.register.open_tickets())]
        for each in pinned:
            put(self._needed, each, True)
        found = at(self._needed, slots)
        for each in pinned:
            put(self._needed, each, False)
        return found

    def begin_anew(self, slots: Tensor) -> None:
        """The rows at these slots are as rows begin, and go when nobody needs them unless they move before."""
        put(self.device.is_guest, slots, True)
        self._guests.append(slots)

    def clear(self) -> None:
        """Know of no row, when the tiers hold none."""
        put(self.device.is_guest, torch.cat([*self._guests, torch.empty(0, dtype=torch.int64)]), False)
        self._guests = []

    def require_idle(self) -> None:
        """Raise where lookups are still open, whose rows must stay."""
        if self.register.num_open:
            raise ConfigError(
                "the rows of a table cannot be replaced while batches are on their way",
                got=f"{self.register.num_open} open lookups",
                fix="end the loop over `prefetch` first, and call step or clear_gradients",
            )

    def _whole(self, keys: Tensor) -> Tensor:
        slots = self.device.index.lookup(keys)
        missing = where(slots < 0)
        if len(missing):
            self._drop_guests(at(slots, where(slots >= 0)))
            put(slots, missing, self._bring(at(keys, missing)))
        self.counts.hit("device", len(keys) - len(missing))
        return slots

    def _pinned(self, number: int, keys: Tensor) -> Tensor:
        device = self.device
        slots = device.index.find(keys)
        self._refuse_if_strict(len(keys))
        missing, here = where(torch.from_numpy(slots.numpy() < 0)), slots.numpy().copy()
        # Pinned before anybody is chosen to leave. To name one once more is quicker than to leave the missing out.
        here[missing.numpy()] = here.max(initial=-1)
        if len(missing) < len(slots):
            device.index.touch(torch.from_numpy(here), number)
        self.counts.hit("device", len(keys) - len(missing))
        if len(missing) or device.num_over:
            arriving = at(slots, missing)
            self._make_room(number, arriving, at(slots, where(slots >= 0)))
            left = where(arriving < 0)
            if len(left):
                brought = self._bring(at(keys, at(missing, left)))
                device.index.touch(brought, number)
                put(arriving, left, brought)
            self.policy.brought(arriving, number, partial(device.updates, arriving))
            put(slots, missing, arriving)
        self.policy.needed(slots, number)
        return slots

    def _bring(self, keys: Tensor) -> Tensor:
        self.device.make_room(len(keys))
        rows = self._scratch.take("coming", len(keys), self._width)
        dirty, new = self.ladder.fetch(keys, rows)
        slots = self.device.bring(keys, rows, dirty)
        if len(new):
            self.begin_anew(at(slots, new))
        return slots

    def _make_room(self, number: int, arriving: Tensor, planned: Tensor) -> None:
        """Let rows leave until those that arrive fit into the capacity, as far as that is possible.

        `arriving` [n] says where they are now (`SlotIndex.find`). One that is in the host tier takes the slot of one
        that leaves, which is then written there. `planned`: slots of rows of this lookup that are here already.
        """
        device = self.device
        in_host, num_new = where(arriving < -1), len(arriving)
        self._drop_guests(planned)
        short = self._short(num_new)
        while short > 0:
            done = self.register.done
            victims = self.policy.victims(short, partial(self._may_go, done=done))
            if len(victims):
                self.counts.events["evicted"] += len(victims)
                short -= len(victims)
                coming, in_host = in_host[: len(victims)], in_host[len(victims) :]
                self.ladder.exchange(device, victims[: len(coming)], flipped(at(arriving, coming)))
                # Pinned before anybody else is chosen to leave.
                device.index.touch(victims[: len(coming)], number)
                put(arriving, coming, victims[: len(coming)])
                if len(victims) > len(coming):
                    self.ladder.put(*device.leave(victims[len(coming) :]))
            if short > 0 and (not num_new or not self._wait_beyond(done)):
                break
            short -= self._drop_guests(planned)
        self.counts.events["overflow"] += min(short, num_new) if short > 0 else 0

    def _short(self, num_new: int) -> int:
        capacity = self.device.capacity
        return 0 if capacity is None else len(self.device) + num_new - capacity

    def _may_go(self, slots: Tensor, done: int) -> Tensor:
        need = at(self.device.last_need, slots).numpy()
        return torch.from_numpy((need != NEVER) & (need <= done))

    def _wait_beyond(self, done: int) -> bool:
        if self.register.done > done:
            return True
        self.counts.events["waits"] += 1
        return self.register.wait_beyond(done)

    def _drop_guests(self, planned: Tensor) -> int:
        """Rows that began here and have not moved are as they would begin again, so they need no place when nobody
        needs them: unseen ids of an evaluation, ids without admission. How many went."""
        if not self._guests:
            return 0
        slots, device = torch.cat(self._guests), self.device
        # Asked first: a lookup that is done by then has said which of its rows moved.
        is_needed = self.needed(slots, planned)
        is_guest = at(device.is_guest, slots)
        going = torch.from_numpy(np.unique(at(slots, where(is_guest & ~is_needed)).numpy()))
        kept = at(slots, where(is_guest & is_needed))
        self._guests = [kept] if len(kept) else []
        put(device.is_guest, going, False)
        device.index.remove(going)
        return len(going)

    def _refuse_if_strict(self, num_rows: int) -> None:
        capacity = self.device.capacity
        if self._is_strict and capacity is not None and num_rows > capacity:
            raise ConfigError(
                "a batch has more distinct rows than the device tier",
                got=f"{num_rows} rows in one lookup, cache.device_rows={capacity}",
                expected=f"cache.device_rows of at least {num_rows}",
                fix=f"cache.device_rows={num_rows}, or cache.strict=false to let the tier grow for such a batch",
            )
