"""Eviction policies: which rows leave a full tier first. A policy changes how often rows move, never a number.

Batches are numbered in the order in which they are planned.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.tables.indexing import at, put
from kitforge.embedding_cache.eviction.score_queue import EvictableMask, LowestScoreQueue
from kitforge.embedding_cache.keys.slot_map import SlotMap, grow_rows
from kitforge.embedding_cache.options import PolicyOptions

# The exponent of an access at which all lfu scores are scaled down, far below what float64 can hold.
MAX_EXPONENT = 500.0
# A search of the lru policy queues at least this share of all slots, so that searches are rare.
LRU_SEARCH_DIVISOR = 8

Slots = NDArray[np.int64]


class EvictionPolicy(ABC):
    """Orders the slots in use by who leaves first."""

    # Batches to read ahead beyond the one that is being planned.
    window: int = 0

    def __init__(self, index: SlotMap) -> None:
        self._index = index
        # The distinct keys of each batch read ahead and not planned yet, the next batch first. Only lookahead reads it.
        self.future: deque[Tensor] = deque()

    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """Batch `number` inserted these rows; `updates` gives the number of updates of each so far."""

    def on_access(self, slots: Tensor, number: int) -> None:
        """Batch `number` accesses these rows, which are inserted and touched by now. `slots` is not changed later."""

    @abstractmethod
    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """The first `num` slots to evict, or all evictable ones where there are fewer. The caller evicts them."""


class LruPolicy(EvictionPolicy):
    """Least recently used first: slots in the order of `SlotMap.last_use`, whose numbers never fall, ties by slot.

    Slots that were never touched are not picked. A search queues all slots last used up to some number. No other slot
    becomes that old later, so the queue is complete until it is empty; a slot used or freed since is skipped.
    """

    def __init__(self, index: SlotMap) -> None:
        super().__init__(index)
        self._queue: Slots = np.empty(0, np.int64)
        self._uses: Slots = np.empty(0, np.int64)  # last uses of the queued slots at the time of the search

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        picked = self._first(num, is_evictable)
        size, is_complete = max(3 * num, self._index.room // LRU_SEARCH_DIVISOR), False
        while len(picked) < num and not is_complete:
            is_complete = self._search(size)
            picked = self._first(num, is_evictable)
            size *= 4
        return torch.from_numpy(picked)

    def _first(self, num: int, is_evictable: EvictableMask) -> Slots:
        """Take the first `num` evictable slots off the queue, or all of them."""
        size = num + num // 2
        while True:
            front = self._queue[:size]
            is_left = self._index.last_use.numpy()[front] == self._uses[:size]
            goes = is_left & is_evictable(torch.from_numpy(front)).numpy()
            positions = goes.nonzero()[0][:num]
            if len(positions) == num or size >= len(self._queue):
                break
            size *= 2
        stop = int(positions[-1]) + 1 if len(positions) == num > 0 else len(front)
        stays = (is_left & ~goes)[:stop].nonzero()[0]
        queue, uses = self._queue[stop:], self._uses[stop:]
        # Mostly none stays, and the rest of the queue is long.
        if len(stays):
            queue = np.concatenate([front[stays], queue])
            uses = np.concatenate([self._uses[stays], uses])
        self._queue, self._uses = queue, uses
        picked: Slots = front[positions]
        return picked

    def _search(self, size: int) -> bool:
        """Queue the `size` slots used longest ago, and those last used as long ago; True if these are all."""
        uses = self._index.last_use.numpy()
        last = self._index.num_free + size - 1
        is_complete = last >= len(uses)
        bound = uses.max(initial=0) if is_complete else np.partition(uses, last)[last]
        slots = (uses <= bound).nonzero()[0]
        slots = slots[uses[slots] >= 0] if self._index.num_free else slots
        ages = uses[slots] - uses[slots].min(initial=bound)
        # numpy sorts numbers of 16 bits ten times as fast.
        self._queue = slots[(ages.astype(np.uint16) if ages.max(initial=0) < 2**16 else ages).argsort(kind="stable")]
        self._uses = uses[self._queue]
        return is_complete


class LfuPolicy(EvictionPolicy):
    """Least frequently used first, where an access counts half after `half_life` batches.

    Instead of shrinking all counts with every batch, later accesses count more: 2^(number / half_life) each, which
    keeps the order. An inserted row starts with the number of its updates, as if these had been just now.
    """

    def __init__(self, index: SlotMap, half_life: float) -> None:
        super().__init__(index)
        self._half_life = half_life
        self._counts = torch.zeros(index.room, dtype=torch.float64)
        self._origin = 0
        self._queue = LowestScoreQueue()

    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        if len(self._counts) < self._index.room:
            self._counts = grow_rows(self._counts, self._index.room)
        put(self._counts, slots, updates().double() * self._weight(number))
        self._queue.reset_slots.append(slots)

    def on_access(self, slots: Tensor, number: int) -> None:
        # First, since it may scale all counts down.
        weight = self._weight(number)
        put(self._counts, slots, at(self._counts, slots) + weight)

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        return self._queue.pick(self._counts, self._index.used, num, is_evictable)

    def _weight(self, number: int) -> float:
        exponent = (number - self._origin) / self._half_life
        if exponent > MAX_EXPONENT:
            self._counts *= 2.0**-exponent
            self._origin, exponent = number, 0.0
            self._queue = LowestScoreQueue()
        return float(2.0**exponent)


class LookaheadPolicy(EvictionPolicy):
    """First the rows that no batch read ahead needs, least recently used first; then those needed latest (Belady,
    1966)."""

    def __init__(self, index: SlotMap, window: int) -> None:
        super().__init__(index)
        self.window = window

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        next_access = torch.full((self._index.room,), len(self.future))
        for distance, keys in reversed(list(enumerate(self.future))):
            slots = self._index.lookup(keys)
            next_access[slots[slots >= 0]] = distance
        slots = self._index.used()
        slots = slots[is_evictable(slots)]
        slots = slots[self._index.last_use[slots].argsort(stable=True)]
        return slots[next_access[slots].argsort(stable=True, descending=True)][:num]


def build_policy(options: PolicyOptions, index: SlotMap) -> EvictionPolicy:
    """The policy that `options` name, for the slots of `index`."""
    if options.name == "lfu":
        return LfuPolicy(index, options.half_life)
    return LruPolicy(index) if options.name == "lru" else LookaheadPolicy(index, options.window)
