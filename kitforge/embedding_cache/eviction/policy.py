"""Which rows leave the device tier when others need their place. It decides how often rows move, never a number.

Batches are numbered in the order in which they are planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.indexing import at, put
from kitforge.embedding_cache.eviction.lru_queue import LruQueue
from kitforge.embedding_cache.eviction.score_queue import EvictableMask, LowestScoreQueue
from kitforge.embedding_cache.keys.free_list import grow_rows
from kitforge.embedding_cache.keys.slot_table import SlotTable
from kitforge.embedding_cache.options import PolicyOptions

# The exponent of a need at which all scores are scaled down, far below what float64 can hold.
MAX_EXPONENT = 500.0


class EvictionPolicy(ABC):
    """Keeps what it must know of slots in use to say which are the first to go."""

    # Batches that it wants to be told of beyond the one that is being planned.
    window: int = 0

    @abstractmethod
    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """Batch `number` brought these rows in; `updates` says how often each has moved so far."""

    @abstractmethod
    def on_access(self, slots: Tensor, number: int) -> None:
        """Batch `number` needs these rows, all of which are in place and touched by now. They will not be changed."""

    @abstractmethod
    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """The first `num` slots to go, or all that may go where there are fewer."""

    def on_future_access(self, keys: Tensor) -> None:
        """A lookup that is not planned yet will need these keys. Only lookahead listens."""

    def on_planned(self) -> None:
        """The first of the expected lookups is being planned, and expected no more."""

    def cancel_future(self) -> None:
        """The expected lookups will not come."""


@final
class LruPolicy(EvictionPolicy):
    """The row that has not been needed for longest goes first."""

    def __init__(self, index: SlotTable) -> None:
        self._queue = LruQueue(index)

    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""

    def on_access(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """See `EvictionPolicy`."""
        return self._queue.pick(num, is_evictable)


@final
class LfuPolicy(EvictionPolicy):
    """The row that was needed least often goes first, where a need counts half after `half_life` batches.

    Instead of shrinking all counts with every batch, later needs count more: 2^(number / half_life) each, which keeps
    the order. A row comes in with the number of its updates, as if these had been just now.
    """

    def __init__(self, index: SlotTable, half_life: float) -> None:
        self._index, self._half_life = index, half_life
        self._counts = torch.zeros(index.room, dtype=torch.float64)
        self._origin = 0
        self._queue = LowestScoreQueue()

    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""
        self._counts = _fitting(self._counts, self._index)
        put(self._counts, slots, updates().double() * self._weight(number))
        self._queue.on_score_reset(slots)

    def on_access(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""
        # First, since it may scale all counts down.
        weight = self._weight(number)
        put(self._counts, slots, at(self._counts, slots) + weight)

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """See `EvictionPolicy`."""
        return self._queue.pick(self._counts, self._index.used, num, is_evictable)

    def _weight(self, number: int) -> float:
        exponent = (number - self._origin) / self._half_life
        if exponent > MAX_EXPONENT:
            self._counts *= 2.0**-exponent
            self._origin, exponent = number, 0.0
            self._queue.reset()
        return float(2.0**exponent)


@final
class LookaheadPolicy(EvictionPolicy):
    """The row that the batches read ahead need latest goes first (Belady, 1966), before it those that none needs.

    Among rows that none of them needs, the one not needed for longest.
    """

    def __init__(self, index: SlotTable, window: int) -> None:
        self.window = window
        self._index = index
        self._ahead: deque[Tensor] = deque()

    def on_future_access(self, keys: Tensor) -> None:
        """See `EvictionPolicy`."""
        self._ahead.append(keys)

    def on_planned(self) -> None:
        """See `EvictionPolicy`."""
        if self._ahead:
            self._ahead.popleft()

    def cancel_future(self) -> None:
        """See `EvictionPolicy`."""
        self._ahead.clear()

    def on_insert(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""

    def on_access(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""

    def victims(self, num: int, is_evictable: EvictableMask) -> Tensor:
        """See `EvictionPolicy`."""
        next_access = torch.full((self._index.room,), len(self._ahead))
        for distance, keys in reversed(list(enumerate(self._ahead))):
            slots = self._index.lookup(keys)
            next_access[slots[slots >= 0]] = distance
        slots = self._index.used()
        slots = slots[is_evictable(slots)]
        slots = slots[self._index.last_use[slots].argsort(stable=True)]
        return slots[next_access[slots].argsort(stable=True, descending=True)][:num]


def build_policy(options: PolicyOptions, index: SlotTable) -> EvictionPolicy:
    """The policy that `options` name, for the slots of `index`."""
    builders: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": lambda: LruPolicy(index),
        "lfu": lambda: LfuPolicy(index, options.half_life),
        "lookahead": lambda: LookaheadPolicy(index, options.window),
    }
    return builders[options.name]()


def _fitting(values: Tensor, index: SlotTable) -> Tensor:
    """The values, grown to the room of the index."""
    return values if len(values) >= index.room else grow_rows(values, index.room)
