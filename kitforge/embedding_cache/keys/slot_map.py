"""The map from key to slot of one tier, with the free slots and the last use of each slot. It holds no rows.

Two tiers in memory share one hash map, since a key is in at most one of them: its location is a slot of the first tier,
or -2 - slot of the second. One search finds a key in either tier.

Where lookups are planned on a device, that has a copy of the map. It learns of each key that gets or loses a slot here,
so it needs no state in a checkpoint.

Legend: keys [n] int64, any value; slots [n] int64 from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import HashMapFactory, HashMapKernel
from kitforge.foundation.device import copy_to

# Room before the first growth, where the number of rows is not known.
INITIAL_ROOM = 1024
# The last use of a free slot.
NEVER_USED = -1


class SlotMap:
    """Keys and slots, each at most once. Not thread-safe."""

    def __init__(
        self,
        new_hash_map: HashMapFactory,
        room: int,
        first: SlotMap | None = None,
        copy: tuple[HashMapKernel, torch.device] | None = None,
    ) -> None:
        """`first` is the map of the tier above; this tier then shares its hash map as the second of the two. `copy` is
        an empty map and the device that it is for."""
        self.room, self.num_free = room, room
        self._copy = copy
        self._locations: HashMapKernel = new_hash_map(room) if first is None else first._locations
        self._is_second = first is not None
        self._keys = torch.zeros(room, dtype=torch.int64)
        # A stack: slots that were freed last are given out first, else in ascending order.
        self._free = torch.arange(room - 1, -1, -1)
        self.is_used = torch.zeros(room, dtype=torch.bool)
        # The number that `touch` was last called with for the key in the slot.
        self.last_use = torch.full((room,), NEVER_USED)

    def __len__(self) -> int:
        return self.room - self.num_free

    def find(self, keys: Tensor) -> Tensor:
        """The location of each key: a slot of this tier, -1 for nowhere, -2 - slot for a slot of the other tier."""
        locations = self._locations.lookup(keys)
        return flip_location(locations) if self._is_second else locations

    def find_and_touch(self, keys: Tensor, number: int) -> Tensor:
        """`find` distinct keys in the first of two tiers, and `touch` those that are in it."""
        return self._locations.lookup(keys, self.last_use, number)

    def lookup(self, keys: Tensor) -> Tensor:
        """The slots of keys, -1 for a key that is not in this tier."""
        slots = self.find(keys)
        array = slots.numpy()
        array[array < 0] = -1
        return slots

    def keys_at(self, slots: Tensor) -> Tensor:
        """The keys in slots that are in use."""
        return torch.from_numpy(self._keys.numpy()[slots.numpy()])

    def touch(self, slots: Tensor, number: int) -> None:
        """Set the last use of these slots."""
        self.last_use.numpy()[slots.numpy()] = number

    def add(self, keys: Tensor) -> Tensor:
        """Give each of these distinct keys a new slot, at most `num_free`; a key that had a slot loses the old one."""
        self.num_free -= len(keys)
        slots = self._free[self.num_free : self.num_free + len(keys)].flip(0)
        if self._copy is not None:
            there, device = self._copy
            there.insert(copy_to(keys, device), copy_to(slots, device))
        self._keys.numpy()[slots.numpy()] = keys.numpy()
        self.is_used.numpy()[slots.numpy()] = True
        before = self._locations.insert(keys, flip_location(slots) if self._is_second else slots).numpy()
        replaced = before[before < -1] if self._is_second else before[before >= 0]
        if len(replaced):
            self._release(torch.from_numpy(-2 - replaced if self._is_second else replaced))
        return slots

    def remove(self, slots: Tensor) -> Tensor:
        """Free slots that are in use and return their keys."""
        keys = self.keys_at(slots)
        self._locations.remove(keys)
        if self._copy is not None and len(keys):
            there, device = self._copy
            there.remove(copy_to(keys, device))
        self._release(slots)
        return keys

    def pop(self, keys: Tensor) -> Tensor:
        """Free the slots of keys and return these slots, -1 for a key that is not in this tier."""
        slots = self.lookup(keys)
        self.remove(torch.from_numpy(slots.numpy()[slots.numpy() >= 0]))
        return slots

    def exchange(self, slots: Tensor, second: SlotMap, positions: Tensor) -> None:
        """Swap the keys at `slots` [n] of this tier with those at `positions` [n] of the tier that shares the map."""
        down, up = self.keys_at(slots), second.keys_at(positions)
        self._keys.numpy()[slots.numpy()] = up.numpy()
        second._keys.numpy()[positions.numpy()] = down.numpy()
        self._locations.replace(up, slots)
        self._locations.replace(down, flip_location(positions))

    def grow(self, room: int) -> None:
        """Have at least `room` slots."""
        added = room - self.room
        if added <= 0:
            return
        self._free = torch.cat(
            [
                torch.arange(room - 1, self.room - 1, -1),
                self._free[: self.num_free],
                torch.empty(len(self), dtype=torch.int64),
            ]
        )
        self._keys, self.is_used = grow_rows(self._keys, room), grow_rows(self.is_used, room)
        self.last_use = torch.cat([self.last_use, torch.full((added,), NEVER_USED)])
        self.room, self.num_free = room, self.num_free + added

    def used(self) -> Tensor:
        """All slots in use, ascending."""
        return torch.from_numpy(self.is_used.numpy().nonzero()[0])

    def _release(self, slots: Tensor) -> None:
        self.is_used.numpy()[slots.numpy()] = False
        self.last_use.numpy()[slots.numpy()] = NEVER_USED
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)


def flip_location(slots: Tensor) -> Tensor:
    """Slots of one tier as the other tier of a pair sees them, and back; -1, nowhere, stays -1."""
    return torch.from_numpy(-2 - slots.numpy())


def grow_rows(values: Tensor, room: int) -> Tensor:
    """A copy with `room` rows; the new rows are zero."""
    larger = values.new_zeros(room, *values.shape[1:])
    larger[: len(values)] = values
    return larger
