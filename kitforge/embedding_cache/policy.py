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

from kitforge.core.kernels.places import at, put
from kitforge.embedding_cache.coldest import Coldest, MayGo
from kitforge.embedding_cache.free_slots import grown
from kitforge.embedding_cache.index import SlotIndex
from kitforge.embedding_cache.oldest import Oldest
from kitforge.embedding_cache.options import PolicyOptions

# The exponent of a need at which all scores are scaled down, far below what float64 can hold.
LARGEST_EXPONENT = 500.0


class EvictionPolicy(ABC):
    """Keeps what it must know of slots in use to say which are the first to go."""

    # Batches that it wants to be told of beyond the one that is being planned.
    window: int = 0

    @abstractmethod
    def brought(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """Batch `number` brought these rows in; `updates` says how often each has moved so far."""

    @abstractmethod
    def needed(self, slots: Tensor, number: int) -> None:
        """Batch `number` needs these rows, all of which are in place and touched by now. They will not be changed."""

    @abstractmethod
    def victims(self, num: int, may_go: MayGo) -> Tensor:
        """The first `num` slots to go, or all that may go where there are fewer."""

    def expect(self, keys: Tensor) -> None:
        """A lookup that is not planned yet will need these keys. Only lookahead listens."""

    def met(self) -> None:
        """The first of the expected lookups is being planned, and expected no more."""

    def expect_nothing(self) -> None:
        """The expected lookups will not come."""


@final
class Lru(EvictionPolicy):
    """The row that has not been needed for longest goes first."""

    def __init__(self, index: SlotIndex) -> None:
        self._oldest = Oldest(index)

    def brought(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""

    def needed(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""

    def victims(self, num: int, may_go: MayGo) -> Tensor:
        """See `EvictionPolicy`."""
        return self._oldest.pick(num, may_go)


@final
class Lfu(EvictionPolicy):
    """The row that was needed least often goes first, where a need counts half after `half_life` batches.

    Instead of shrinking all counts with every batch, later needs count more: 2^(number / half_life) each, which keeps
    the order. A row comes in with the number of its updates, as if these had been just now.
    """

    def __init__(self, index: SlotIndex, half_life: float) -> None:
        self._index, self._half_life = index, half_life
        self._counts = torch.zeros(index.room, dtype=torch.float64)
        self._origin = 0
        self._coldest = Coldest()

    def brought(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""
        self._counts = _fitting(self._counts, self._index)
        put(self._counts, slots, updates().double() * self._weight(number))
        self._coldest.restarted(slots)

    def needed(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""
        # First, since it may scale all counts down.
        weight = self._weight(number)
        put(self._counts, slots, at(self._counts, slots) + weight)

    def victims(self, num: int, may_go: MayGo) -> Tensor:
        """See `EvictionPolicy`."""
        return self._coldest.pick(self._counts, self._index.used, num, may_go)

    def _weight(self, number: int) -> float:
        exponent = (number - self._origin) / self._half_life
        if exponent > LARGEST_EXPONENT:
            self._counts *= 2.0**-exponent
            self._origin, exponent = number, 0.0
            self._coldest.reset()
        return float(2.0**exponent)


@final
class Lookahead(EvictionPolicy):
    """The row that the batches read ahead need latest goes first (Belady, 1966), before it those that none needs.

    Among rows that none of them needs, the one not needed for longest.
    """

    def __init__(self, index: SlotIndex, window: int) -> None:
        self.window = window
        self._index = index
        self._ahead: deque[Tensor] = deque()

    def expect(self, keys: Tensor) -> None:
        """See `EvictionPolicy`."""
        self._ahead.append(keys)

    def met(self) -> None:
        """See `EvictionPolicy`."""
        if self._ahead:
            self._ahead.popleft()

    def expect_nothing(self) -> None:
        """See `EvictionPolicy`."""
        self._ahead.clear()

    def brought(self, slots: Tensor, number: int, updates: Callable[[], Tensor]) -> None:
        """See `EvictionPolicy`."""

    def needed(self, slots: Tensor, number: int) -> None:
        """See `EvictionPolicy`."""

    def victims(self, num: int, may_go: MayGo) -> Tensor:
        """See `EvictionPolicy`."""
        following = torch.full((self._index.room,), len(self._ahead))
        for place, keys in reversed(list(enumerate(self._ahead))):
            slots = self._index.lookup(keys)
            following[slots[slots >= 0]] = place
        slots = self._index.used()
        slots = slots[may_go(slots)]
        slots = slots[self._index.last_use[slots].argsort(stable=True)]
        return slots[following[slots].argsort(stable=True, descending=True)][:num]


def build_policy(options: PolicyOptions, index: SlotIndex) -> EvictionPolicy:
    """The policy that `options` name, for the slots of `index`."""
    builders: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": lambda: Lru(index),
        "lfu": lambda: Lfu(index, options.half_life),
        "lookahead": lambda: Lookahead(index, options.window),
    }
    return builders[options.name]()


def _fitting(values: Tensor, index: SlotIndex) -> Tensor:
    """The values, grown to the room of the index."""
    return values if len(values) >= index.room else grown(values, index.room)
