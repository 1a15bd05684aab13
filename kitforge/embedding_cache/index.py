"""The slots of a tier: what stands in which, which are free, and when each was used. It holds no rows.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.places import at, put, where
from kitforge.embedding_cache.free_slots import FreeSlots, grown
from kitforge.embedding_cache.keys import Keys, SharedKeys

# Room before the first growth, where it is not said how much there will be.
FIRST_ROOM = 1024
# The last use of a slot that nothing stands in.
NEVER = -1


@final
class SlotIndex:
    """Keys and slots, each at most once. Not for two threads at once."""

    def __init__(self, keys: Keys, room: int) -> None:
        """`keys`: none yet, and with as much room."""
        self._keys = keys
        self._free = FreeSlots(room)
        # Of slots in use; what stands at the others means nothing.
        self.is_used = torch.zeros(room, dtype=torch.bool)
        # The number that `touch` was last called with for what is there.
        self.last_use = torch.full((room,), NEVER)

    def __len__(self) -> int:
        return self.room - self.num_free

    @property
    def room(self) -> int:
        """Slots, used and free."""
        return self._free.room

    @property
    def num_free(self) -> int:
        """Slots that can be given out before it has to grow."""
        return len(self._free)

    def find(self, keys: Tensor) -> Tensor:
        """Where keys are: a slot, -1 for nowhere, or `flipped` a slot of the tier that shares its keys with this."""
        return self._keys.find(keys)

    def lookup(self, keys: Tensor) -> Tensor:
        """The slots of keys, -1 where one is not there."""
        found = self._keys.find(keys)
        put(found, where(found < 0), -1)
        return found

    def keys_at(self, slots: Tensor) -> Tensor:
        """The keys at slots that are in use."""
        return self._keys.at(slots)

    def touch(self, slots: Tensor, number: int) -> None:
        """These slots are in use now, by whatever `number` the owner counts."""
        put(self.last_use, slots, number)

    def add(self, keys: Tensor) -> Tensor:
        """Give distinct keys a slot each, at most `num_free`; one that had a slot has this one in its place."""
        slots = self._free.take(len(keys))
        before = self._keys.enter(keys, slots)
        put(self.is_used, slots, True)
        self._release(at(before, where(before >= 0)))
        return slots

    def remove(self, slots: Tensor) -> Tensor:
        """Free slots that are in use; their keys."""
        keys = self._keys.leave(slots)
        self._release(slots)
        return keys

    def take(self, keys: Tensor) -> Tensor:
        """Free the slots of keys: which those were, -1 where one is not there."""
        slots = self.lookup(keys)
        self.remove(at(slots, where(slots >= 0)))
        return slots

    def exchange(self, slots: Tensor, other: SlotIndex, places: Tensor) -> None:
        """The keys at `slots` [n] and those at `places` [n] of the tier that shares its keys change places."""
        assert isinstance(self._keys, SharedKeys)
        assert isinstance(other._keys, SharedKeys)
        self._keys.exchange(slots, other._keys, places)

    def grow(self, room: int) -> None:
        """Have at least so many slots."""
        before = self.room
        if room <= before:
            return
        self._free.grow(room)
        self._keys.grow(room)
        self.is_used = grown(self.is_used, room)
        self.last_use = torch.cat([self.last_use, torch.full((room - before,), NEVER)])

    def used(self) -> Tensor:
        """All slots in use, ascending."""
        return where(self.is_used)

    def _release(self, slots: Tensor) -> None:
        put(self.is_used, slots, False)
        put(self.last_use, slots, NEVER)
        self._free.give_back(slots)
