"""Which key stands in which slot of a tier: of one alone, or of two that share their keys.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import HashMapFactory
from kitforge.core.kernels.indexing import at, put, where
from kitforge.embedding_cache.keys.free_list import FreeList, grow_rows

ABSENT = -1


class BaseKeyMap(ABC):
    """Keys by slot, and slots by key. Not for two threads at once."""

    @abstractmethod
    def find(self, keys: Tensor) -> Tensor:
        """The slots of keys, -1 where one is nowhere, and `flipped` a slot of the other of two tiers."""

    @abstractmethod
    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Give distinct keys these slots; where they were before, as `find` has it."""

    @abstractmethod
    def remove(self, slots: Tensor) -> Tensor:
        """Forget what stands in these slots: the keys."""

    @abstractmethod
    def keys_at(self, slots: Tensor) -> Tensor:
        """The keys in slots that are in use; for any other, what is given means nothing."""

    @abstractmethod
    def grow(self, room: int) -> None:
        """Have so many slots, more than before."""


@final
class KeyMap(BaseKeyMap):
    """Those of one tier."""

    def __init__(self, new_hash_map: HashMapFactory, room: int) -> None:
        self._slots = new_hash_map(room)
        self._keys = torch.zeros(room, dtype=torch.int64)

    def find(self, keys: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        return self._slots.lookup(keys)

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        put(self._keys, slots, keys)
        return self._slots.insert(keys, slots)

    def remove(self, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        keys = self.keys_at(slots)
        self._slots.remove(keys)
        return keys

    def keys_at(self, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        return at(self._keys, slots)

    def grow(self, room: int) -> None:
        """See `BaseKeyMap`."""
        self._keys = grow_rows(self._keys, room)


@final
class SharedKeyMap(BaseKeyMap):
    """Those of one of two tiers, of which a key is in one. Each has a number, by which it is known where it is, so that
    one search finds it in either, and keys change places without a search."""

    def __init__(self, registry: KeyRegistry, room: int, *, is_second: bool) -> None:
        self._registry, self._is_second = registry, is_second
        self._numbers = torch.zeros(room, dtype=torch.int64)

    def find(self, keys: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        return self._encode(self._registry.find(keys))

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        numbers = self._registry.numbers_for(keys)
        before = self._encode(at(self._registry.locations, numbers))
        self._assign(numbers, slots)
        return before

    def remove(self, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        return self._registry.remove(at(self._numbers, slots))

    def keys_at(self, slots: Tensor) -> Tensor:
        """See `BaseKeyMap`."""
        return at(self._registry.keys, at(self._numbers, slots))

    def grow(self, room: int) -> None:
        """See `BaseKeyMap`."""
        self._numbers = grow_rows(self._numbers, room)

    def exchange(self, slots: Tensor, other: SharedKeyMap, positions: Tensor) -> None:
        """What stands in `slots` [n] and in `places` [n] of the other tier changes places."""
        going, coming = at(self._numbers, slots), at(other._numbers, positions)
        self._assign(coming, slots)
        other._assign(going, positions)

    def _assign(self, numbers: Tensor, slots: Tensor) -> None:
        put(self._numbers, slots, numbers)
        put(self._registry.locations, numbers, self._encode(slots))

    def _encode(self, positions: Tensor) -> Tensor:
        return encode_other_tier(positions) if self._is_second else positions


@final
class KeyRegistry:
    """The numbers of keys that are in one of two tiers, and where each is: a slot of the first, or flipped one of the
    second."""

    def __init__(self, new_hash_map: HashMapFactory, room: int) -> None:
        self._numbers, self._free = new_hash_map(room), FreeList(room)
        self.keys = torch.zeros(room, dtype=torch.int64)
        self.locations = torch.full((room,), ABSENT)

    def find(self, keys: Tensor) -> Tensor:
        """The places of keys."""
        return self._numbers.lookup(keys, through=self.locations)

    def numbers_for(self, keys: Tensor) -> Tensor:
        """The numbers of distinct keys, new ones for those that have none."""
        numbers = self._numbers.lookup(keys)
        new = where(numbers < 0)
        if len(new):
            keys = at(keys, new)
            self._make_room(len(new))
            given = self._free.allocate(len(new))
            self._numbers.insert(keys, given)
            put(self.keys, given, keys)
            put(numbers, new, given)
        return numbers

    def remove(self, numbers: Tensor) -> Tensor:
        """These are in neither tier any more: their keys."""
        keys = at(self.keys, numbers)
        self._numbers.remove(keys)
        put(self.locations, numbers, ABSENT)
        self._free.release(numbers)
        return keys

    def _make_room(self, num_new: int) -> None:
        short = num_new - len(self._free)
        if short > 0:
            room = max(2 * self._free.room, self._free.room + short)
            self._free.grow(room)
            self.keys = grow_rows(self.keys, room)
            self.locations = torch.cat([self.locations, torch.full((room - len(self.locations),), ABSENT)])


def encode_other_tier(slots: Tensor) -> Tensor:
    """Slots of the other of two tiers; of these, the slots. What is nowhere, -1, stays that."""
    return torch.from_numpy(-2 - slots.numpy())
