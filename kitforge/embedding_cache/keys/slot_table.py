"""The slots of a tier: what stands in which, which are free, and when each was used. It holds no rows.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.indexing import at, put, where
from kitforge.embedding_cache.keys.free_list import FreeList, grow_rows
from kitforge.embedding_cache.keys.key_map import BaseKeyMap, SharedKeyMap

# Room before the first growth, where it is not said how much there will be.
INITIAL_ROOM = 1024
# The last use of a slot that nothing stands in.
NEVER_USED = -1


@final
class SlotTable:
    """Keys and slots, each at most once. Not for two threads at once."""

    def __init__(self, keys: BaseKeyMap, room: int) -> None:
        """`keys`: none yet, and with as much room."""
        self._keys = keys
        self._free = FreeList(room)
        # Of slots in use; what stands at the others means nothing.
        self.is_used = torch.zeros(room, dtype=torch.bool)
        # The number that `touch` was last called with for what is there.
        self.last_use = torch.full((room,), NEVER_USED)

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
        slots = self._keys.find(keys)
        put(slots, where(slots < 0), -1)
        return slots

    def keys_at(self, slots: Tensor) -> Tensor:
        """The keys at slots that are in use."""
        return self._keys.keys_at(slots)

    def touch(self, slots: Tensor, number: int) -> None:
        """These slots are in use now, by whatever `number` the owner counts."""
        put(self.last_use, slots, number)

    def add(self, keys: Tensor) -> Tensor:
        """Give distinct keys a slot each, at most `num_free`; one that had a slot has this one in its place."""
        slots = self._free.allocate(len(keys))
        before = self._keys.insert(keys, slots)
        put(self.is_used, slots, True)
        self._release(at(before, where(before >= 0)))
        return slots

    def remove(self, slots: Tensor) -> Tensor:
        """Free slots that are in use; their keys."""
        keys = self._keys.remove(slots)
        self._release(slots)
        return keys

    def pop(self, keys: Tensor) -> Tensor:
        """Free the slots of keys: which those were, -1 where one is not there."""
        slots = self.lookup(keys)
        self.remove(at(slots, where(slots >= 0)))
        return slots

    def exchange(self, slots: Tensor, other: SlotTable, positions: Tensor) -> None:
        """The keys at `slots` [n] and those at `places` [n] of the tier that shares its keys change places."""
        assert isinstance(self._keys, SharedKeyMap)
        assert isinstance(other._keys, SharedKeyMap)
        self._keys.exchange(slots, other._keys, positions)

    def grow(self, room: int) -> None:
        """Have at least so many slots."""
        before = self.room
        if room <= before:
            return
        self._free.grow(room)
        self._keys.grow(room)
        self.is_used = grow_rows(self.is_used, room)
        self.last_use = torch.cat([self.last_use, torch.full((room - before,), NEVER_USED)])

    def used(self) -> Tensor:
        """All slots in use, ascending."""
        return where(self.is_used)

    def _release(self, slots: Tensor) -> None:
        put(self.is_used, slots, False)
        put(self.last_use, slots, NEVER_USED)
        self._free.release(slots)
