"""Which slots of a growing array are free."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class FreeList:
    """Slots [n] int64 from 0 that can be given out, those given back last first, else in ascending order."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self._free = torch.arange(room - 1, -1, -1)
        self._num_free = room

    def __len__(self) -> int:
        return self._num_free

    def allocate(self, num: int) -> Tensor:
        """Give out so many, of which there must be as many."""
        self._num_free -= num
        return self._free[self._num_free : self._num_free + num].flip(0)

    def release(self, slots: Tensor) -> None:
        """These are free again."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def grow(self, room: int) -> None:
        """Have so many slots, more than before."""
        free = torch.cat([torch.arange(room - 1, self.room - 1, -1), self._free[: self._num_free]])
        self._free = torch.cat([free, torch.empty(room - len(free), dtype=torch.int64)])
        self._num_free += room - self.room
        self.room = room


def grow_rows(values: Tensor, room: int) -> Tensor:
    """The same values with room for more along the first dim, which is zero."""
    larger = values.new_zeros(room, *values.shape[1:])
    larger[: len(values)] = values
    return larger
