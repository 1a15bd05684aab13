"""Frequencies of 64-bit keys over any number of chunks, in bounded memory."""

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array

_SALT = 0x2545F4914F6CDD1D


class FrequencyCounter:
    """Counts of keys: exact up to `limit` distinct keys, beyond that of a sample of the keys.

    The sample holds the keys whose hash is divisible by a power of two, which doubles on overflow (Gibbons 2001). It
    depends on the set of keys alone; `scale` times its size estimates the number of distinct keys.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.keys = np.zeros(0, np.int64)  # distinct, ascending
        self.counts = np.zeros(0, np.int64)
        self.scale = 1
        self._limit = limit

    def add(self, keys: NDArray[np.int64]) -> None:
        """Add the keys [n] to the counts."""
        distinct, counts = np.unique(keys[self._is_kept(keys)] if self.scale > 1 else keys, return_counts=True)
        positions = np.searchsorted(self.keys, distinct)
        at = np.minimum(positions, max(len(self.keys) - 1, 0))
        known = self.keys[at] == distinct if len(self.keys) else np.zeros(len(distinct), bool)
        self.counts[at[known]] += counts[known]
        self.keys = np.insert(self.keys, positions[~known], distinct[~known])
        self.counts = np.insert(self.counts, positions[~known], counts[~known])
        while self._limit is not None and len(self.keys) > self._limit:
            self.scale *= 2
            kept = self._is_kept(self.keys)
            self.keys, self.counts = self.keys[kept], self.counts[kept]

    def _is_kept(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept: NDArray[np.bool_] = hash_array(keys.view(np.uint64), _SALT) % np.uint64(self.scale) == 0
        return kept

    def by_frequency(self, min_count: int = 1, max_size: int | None = None) -> NDArray[np.int64]:
        """Keys by descending count, then ascending key."""
        order = np.lexsort((self.keys, -self.counts))
        order = order[self.counts[order] >= min_count]
        return self.keys[order[:max_size]]
