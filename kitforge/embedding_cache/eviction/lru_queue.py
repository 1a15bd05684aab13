"""The slots that have not been used for longest, found by looking at all slots once for several picks."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.embedding_cache.eviction.score_queue import EvictableMask
from kitforge.embedding_cache.keys.slot_table import SlotTable

# A search queues at least this share of all slots, so that searches are rare.
SEARCH_DIVISOR = 8

Slots = NDArray[np.int64]


@final
class LruQueue:
    """Slots in the order of their last use, as `SlotTable.touch` has it, whose numbers never fall; of one number, in
    ascending order. Slots that were never touched are not picked.

    A search queues all slots last used up to some number. None becomes as old as that later, so the queue lacks none
    until it runs out; one that was used or freed since counts for nothing.
    """

    def __init__(self, index: SlotTable) -> None:
        self._index = index
        self._queue: Slots = np.empty(0, np.int64)
        self._uses: Slots = np.empty(0, np.int64)  # of the queue, when it was made

    def pick(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """The `num` slots used longest ago that may go, or all that may go where there are fewer. Whoever asks lets
        them go."""
        picked = self._first(num, is_evictable)
        size, is_complete = max(3 * num, self._index.room // SEARCH_DIVISOR), False
        while len(picked) < num and not is_complete:
            is_complete = self._search(size)
            picked = self._first(num, is_evictable)
            size *= 4
        return torch.from_numpy(picked)

    def _first(self, num: int, is_evictable: EvictableMask) -> Slots:
        """Take the first `num` that may go off the queue, or all that may."""
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
        # Mostly none do, and the rest of the queue is long.
        remaining = (self._queue[stop:], self._uses[stop:])
        if len(stays):
            remaining = (
                np.concatenate([front[stays], remaining[0]]),
                np.concatenate([self._uses[stays], remaining[1]]),
            )
        self._queue, self._uses = remaining
        picked: Slots = front[positions]
        return picked

    def _search(self, size: int) -> bool:
        """Queue the `size` slots used longest ago, and those last used as long ago; whether these are all."""
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
