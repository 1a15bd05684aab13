"""A vectorised index from 64-bit keys to list positions. Any int64 is a valid key."""

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array

_SALT = 0x5851F42D4C957F2D


class IdIndex:
    """Positions of distinct keys: an open-addressing hash table with linear probing, at most half full."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        size = 2 ** max(int(2 * max(len(keys), 1) - 1).bit_length(), 3)
        self._mask = np.uint64(size - 1)
        self._keys = np.zeros(size, np.int64)
        self._positions = np.full(size, -1, np.int64)
        waiting = np.arange(len(keys), dtype=np.int64)
        slots = self._first(keys)
        while len(waiting):
            # If several keys probe one free slot, the first in the list gets it.
            free = self._positions[slots] < 0
            wanted, first = np.unique(slots[free], return_index=True)
            winners = waiting[free][first]
            self._positions[wanted] = winners
            self._keys[wanted] = keys[winners]
            left = self._positions[slots] != waiting
            waiting, slots = waiting[left], (slots[left] + 1) & self._mask.astype(np.int64)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of each key [n], -1 for unknown keys."""
        slots = self._first(keys)
        candidates = self._positions[slots]
        rows = np.flatnonzero((candidates >= 0) & (self._keys[slots] != keys))
        slots = slots[rows]
        while len(rows):
            slots = (slots + 1) & self._mask.astype(np.int64)
            positions = self._positions[slots]
            candidates[rows] = positions
            on = (positions >= 0) & (self._keys[slots] != keys[rows])
            rows, slots = rows[on], slots[on]
        return candidates

    def _first(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return (hash_array(keys.view(np.uint64), _SALT) & self._mask).astype(np.int64)
