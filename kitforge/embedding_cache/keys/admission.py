"""Feature admission: which ids get a row of their own."""

import math

import torch
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import HashMapFactory
from kitforge.core.kernels.tables.indexing import where
from kitforge.core.parallel.table import GAMMA, logical_shift_right, splitmix64
from kitforge.embedding_cache.options import MAX_COUNT, AdmissionOptions
from kitforge.foundation import seed as seeds

# An entry of the map holds a count and the step in which it last rose.
COUNT_BITS = MAX_COUNT.bit_length()
# Entries before the first sweep of counts that have expired.
MIN_SWEEP = 2**12


class Admission:
    """Admits an id from the n-th training step that looks it up, where n is the same for all ids or drawn for each.

    A step counts an id once, in however many lookups and micro-batches it occurs. Admission with probability p per step
    draws n from a geometric distribution; n is a pure function of (seed, table, id), so the order does not matter. The
    count of an id that is not admitted expires after `age` steps without it. Only the training thread calls this.
    """

    def __init__(self, options: AdmissionOptions, new_hash_map: HashMapFactory, seed: int, table: str) -> None:
        self._options = options
        self._key = seeds.key(seed, "admission", table)
        self._new_hash_map = new_hash_map
        # True if nothing has to be counted.
        self.admits_all = options.name == "always"
        self._entries, self._num_swept = new_hash_map(), 0
        self.step, self._is_open = 1, False

    def admit(self, keys: Tensor, *, is_counted: bool) -> Tensor:
        """The mask of those of these distinct keys that are admitted. `is_counted`: count the current step first."""
        counts, last, thresholds = self._counts(keys)
        if is_counted:
            counts += last != self.step
            counts.clamp_(max=MAX_COUNT)
            self._entries.insert(keys, self.step << COUNT_BITS | counts)
            self._is_open = True
        return counts >= thresholds

    def end_step(self) -> None:
        """Later lookups belong to the next step, if any were counted in this one."""
        self.step += self._is_open
        self._is_open = False
        if self._options.age is not None and len(self._entries) > 2 * self._num_swept + MIN_SWEEP:
            # Free the memory of expired counts.
            keys, counts = self.counts()
            self._entries = self._new_hash_map(len(keys))
            self.restore(keys, counts)
            self._num_swept = len(keys)

    def remove(self, keys: Tensor) -> None:
        """The rows of these keys were deleted: their counts restart."""
        self._entries.remove(keys)

    def counts(self) -> tuple[Tensor, Tensor]:
        """All counted keys [n], ascending, and [n, 2]: the count of each and the step in which it last rose."""
        keys, _ = self._entries.items()
        counts, last, _ = self._counts(keys)
        kept = where(counts > 0)
        return keys[kept], torch.stack([counts[kept], last[kept]], 1)

    def restore(self, keys: Tensor, counts: Tensor) -> None:
        """Insert counts [n, 2] of keys, as `counts` returns them."""
        self._entries.insert(keys, counts[:, 1] << COUNT_BITS | counts[:, 0])

    def clear(self) -> None:
        """Drop all counts."""
        self._entries = self._new_hash_map()
        self._num_swept = 0
        self.step = 1
        self._is_open = False

    def _counts(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each key [n]: its count, the step in which it last rose (0: never), and the count that admits it."""
        name, probability = self._options.name, self._options.probability
        if name == "count":
            thresholds = torch.full((len(keys),), self._options.count)
        elif name == "always" or probability == 1.0:
            thresholds = torch.zeros(len(keys), dtype=torch.int64)
        else:
            hashed = logical_shift_right(splitmix64(splitmix64(keys + self._key) + GAMMA), 11)
            unit = (hashed.double() + 0.5) * 2.0**-53
            thresholds = (unit.log() / math.log1p(-probability)).ceil().clamp(1, MAX_COUNT).long()
        entries = self._entries.lookup(keys).clamp_(min=0)
        counts, last = entries & MAX_COUNT, entries >> COUNT_BITS
        if self._options.age is not None:
            counts[(self.step - last > self._options.age) & (counts < thresholds)] = 0
        return counts, last, thresholds
