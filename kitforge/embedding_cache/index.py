"""Which key stands in which slot of a tier, and which slots are free. It holds no rows.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import NewHashMap
from kitforge.core.kernels.places import at, put, where

# Room before the first growth, where it is not said how much there will be.
FIRST_ROOM = 1024
# The last use of a slot that nothing stands in.
NEVER = -1


@final
class SlotIndex:
    """Keys and slots, each at most once. Not for two threads at once."""

    def __init__(self, new_hash_map: NewHashMap, room: int = FIRST_ROOM) -> None:
        self._slots = new_hash_map(room)
        self._free = torch.arange(room - 1, -1, -1)
        self._num_free = room
        # Of slots in use; what stands at the others means nothing.
        self.keys = torch.zeros(room, dtype=torch.int64)
        self.is_used = torch.zeros(room, dtype=torch.bool)
        # The number that `touch` was last called with for what is there.
        self.last_use = torch.full((room,), NEVER)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def room(self) -> int:
        """Slots, used and free."""
        return len(self.keys)

    @property
    def num_free(self) -> int:
        """Slots that can be given out before it has to grow."""
        return self._num_free

    def lookup(self, keys: Tensor) -> Tensor:
        """The slots of keys, -1 where one is not there."""
        return self._slots.lookup(keys)

    def touch(self, slots: Tensor, number: int) -> None:
        """These slots are in use now, by whatever `number` the owner counts."""
        put(self.last_use, slots, number)

    def add(self, keys: Tensor) -> Tensor:
        """Give distinct keys a slot each, at most `num_free`; one that had a slot has this one in its place."""
        self._num_free -= len(keys)
        slots = self._free[self._num_free : self._num_free + len(keys)].flip(0)
        before = self._slots.insert(keys, slots)
        put(self.keys, slots, keys)
        put(self.is_used, slots, True)
        self._release(at(before, where(before >= 0)))
        return slots

    def remove(self, slots: Tensor) -> Tensor:
        """Free slots that are in use; their keys."""
        keys = at(self.keys, slots)
        self._slots.remove(keys)
        self._release(slots)
        return keys

    def take(self, keys: Tensor) -> Tensor:
        """Free the slots of keys: which those were, -1 where one is not there."""
        slots = self._slots.remove(keys)
        self._release(at(slots, where(slots >= 0)))
        return slots

    def grow(self, room: int) -> None:
        """Have at least so many slots."""
        before = self.room
        if room <= before:
            return
        self._free = torch.cat([torch.arange(room - 1, before - 1, -1), self._free[: self._num_free]])
        self._free = torch.cat([self._free, torch.empty(room - len(self._free), dtype=torch.int64)])
        self._num_free += room - before
        self.keys = grown(self.keys, room)
        self.is_used = grown(self.is_used, room)
        self.last_use = torch.cat([self.last_use, torch.full((room - before,), NEVER)])

    def used(self) -> Tensor:
        """All slots in use, ascending."""
        return where(self.is_used)

    def _release(self, slots: Tensor) -> None:
        put(self.is_used, slots, False)
        put(self.last_use, slots, NEVER)
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)


def grown(values: Tensor, room: int) -> Tensor:
    """The same values with room for more along the first dim, which is zero."""
    larger = values.new_zeros(room, *values.shape[1:])
    larger[: len(values)] = values
    return larger
