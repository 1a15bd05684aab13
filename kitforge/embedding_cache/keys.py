"""Which key stands in which slot of a tier: of one alone, or of two that share their keys.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import NewHashMap
from kitforge.core.kernels.places import at, put, where
from kitforge.embedding_cache.free_slots import FreeSlots, grown

NOWHERE = -1


class Keys(ABC):
    """Keys by slot, and slots by key. Not for two threads at once."""

    @abstractmethod
    def find(self, keys: Tensor) -> Tensor:
        """The slots of keys, -1 where one is nowhere, and `flipped` a slot of the other of two tiers."""

    @abstractmethod
    def enter(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Give distinct keys these slots; where they were before, as `find` has it."""

    @abstractmethod
    def leave(self, slots: Tensor) -> Tensor:
        """Forget what stands in these slots: the keys."""

    @abstractmethod
    def at(self, slots: Tensor) -> Tensor:
        """The keys in slots that are in use; for any other, what is given means nothing."""

    @abstractmethod
    def grow(self, room: int) -> None:
        """Have so many slots, more than before."""


@final
class OwnKeys(Keys):
    """Those of one tier."""

    def __init__(self, new_hash_map: NewHashMap, room: int) -> None:
        self._slots = new_hash_map(room)
        self._keys = torch.zeros(room, dtype=torch.int64)

    def find(self, keys: Tensor) -> Tensor:
        """See `Keys`."""
        return self._slots.lookup(keys)

    def enter(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See `Keys`."""
        put(self._keys, slots, keys)
        return self._slots.insert(keys, slots)

    def leave(self, slots: Tensor) -> Tensor:
        """See `Keys`."""
        keys = self.at(slots)
        self._slots.remove(keys)
        return keys

    def at(self, slots: Tensor) -> Tensor:
        """See `Keys`."""
        return at(self._keys, slots)

    def grow(self, room: int) -> None:
        """See `Keys`."""
        self._keys = grown(self._keys, room)


@final
class SharedKeys(Keys):
    """Those of one of two tiers, of which a key is in one. Each has a number, by which it is known where it is, so that
    one search finds it in either, and keys change places without a search."""

    def __init__(self, numbers: Numbers, room: int, *, is_second: bool) -> None:
        self._shared, self._is_second = numbers, is_second
        self._numbers = torch.zeros(room, dtype=torch.int64)

    def find(self, keys: Tensor) -> Tensor:
        """See `Keys`."""
        return self._turned(self._shared.find(keys))

    def enter(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See `Keys`."""
        numbers = self._shared.numbers_for(keys)
        before = self._turned(at(self._shared.places, numbers))
        self._settle(numbers, slots)
        return before

    def leave(self, slots: Tensor) -> Tensor:
        """See `Keys`."""
        return self._shared.forget(at(self._numbers, slots))

    def at(self, slots: Tensor) -> Tensor:
        """See `Keys`."""
        return at(self._shared.keys, at(self._numbers, slots))

    def grow(self, room: int) -> None:
        """See `Keys`."""
        self._numbers = grown(self._numbers, room)

    def exchange(self, slots: Tensor, other: SharedKeys, places: Tensor) -> None:
        """What stands in `slots` [n] and in `places` [n] of the other tier changes places."""
        going, coming = at(self._numbers, slots), at(other._numbers, places)
        self._settle(coming, slots)
        other._settle(going, places)

    def _settle(self, numbers: Tensor, slots: Tensor) -> None:
        put(self._numbers, slots, numbers)
        put(self._shared.places, numbers, self._turned(slots))

    def _turned(self, places: Tensor) -> Tensor:
        return flipped(places) if self._is_second else places


@final
class Numbers:
    """The numbers of keys that are in one of two tiers, and where each is: a slot of the first, or flipped one of the
    second."""

    def __init__(self, new_hash_map: NewHashMap, room: int) -> None:
        self._numbers, self._free = new_hash_map(room), FreeSlots(room)
        self.keys = torch.zeros(room, dtype=torch.int64)
        self.places = torch.full((room,), NOWHERE)

    def find(self, keys: Tensor) -> Tensor:
        """The places of keys."""
        return self._numbers.lookup(keys, through=self.places)

    def numbers_for(self, keys: Tensor) -> Tensor:
        """The numbers of distinct keys, new ones for those that have none."""
        numbers = self._numbers.lookup(keys)
        new = where(numbers < 0)
        if len(new):
            keys = at(keys, new)
            self._make_room(len(new))
            given = self._free.take(len(new))
            self._numbers.insert(keys, given)
            put(self.keys, given, keys)
            put(numbers, new, given)
        return numbers

    def forget(self, numbers: Tensor) -> Tensor:
        """These are in neither tier any more: their keys."""
        keys = at(self.keys, numbers)
        self._numbers.remove(keys)
        put(self.places, numbers, NOWHERE)
        self._free.give_back(numbers)
        return keys

    def _make_room(self, num_new: int) -> None:
        short = num_new - len(self._free)
        if short > 0:
            room = max(2 * self._free.room, self._free.room + short)
            self._free.grow(room)
            self.keys = grown(self.keys, room)
            self.places = torch.cat([self.places, torch.full((room - len(self.places),), NOWHERE)])


def flipped(slots: Tensor) -> Tensor:
    """Slots of the other of two tiers; of these, the slots. What is nowhere, -1, stays that."""
    return torch.from_numpy(-2 - slots.numpy())
