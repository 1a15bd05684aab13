"""Which ids get a row of their own."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import HashMapFactory
from kitforge.core.kernels.indexing import where
from kitforge.core.parallel.table import GAMMA, logical_shift_right, splitmix64
from kitforge.embedding_cache.options import MAX_COUNT, AdmissionOptions
from kitforge.foundation import seed as seeds

# A count and the step in which it last rose, in one number of the map.
COUNT_BITS = MAX_COUNT.bit_length()
# Entries before the first sweep of counts that have expired.
MIN_SWEEP = 2**12


@final
class Admission:
    """An id is admitted from the n-th training step that looks it up on, where n is the same for all or drawn for each.

    A step counts an id once, in however many lookups and micro-batches it is. To admit with probability p in every step
    is to draw n from a geometric distribution; n is a pure function of (seed, table, id), so it depends on no order.
    The count of an id that is not admitted expires after `age` steps without it. Only the training thread calls this.
    """

    def __init__(self, options: AdmissionOptions, new_hash_map: HashMapFactory, seed: int, table: str) -> None:
        self._options = options
        self._key = seeds.key(seed, "admission", table)
        self._new_hash_map = new_hash_map
        self.clear()

    @property
    def admits_all(self) -> bool:
        """Whether nothing has to be counted."""
        return self._options.name == "always"

    def count_step(self, keys: Tensor) -> Tensor:
        """Count the current step for each of these distinct keys; which of them are admitted by now."""
        counts, last, thresholds = self._counts(keys)
        counts += last != self.step
        counts.clamp_(max=MAX_COUNT)
        self._entries.insert(keys, self.step << COUNT_BITS | counts)
        self._is_open = True
        return counts >= thresholds

    def is_admitted(self, keys: Tensor) -> Tensor:
        """Which of these keys are admitted, without counting."""
        counts, _, thresholds = self._counts(keys)
        return counts >= thresholds

    def end_step(self) -> None:
        """The lookups that follow belong to another step, if there were any in this one."""
        self.step += self._is_open
        self._is_open = False
        if self._options.age is not None and len(self._entries) > 2 * self._num_swept + MIN_SWEEP:
            self._sweep()

    def remove(self, keys: Tensor) -> None:
        """The rows of these keys are gone for good: their ids begin anew."""
        self._entries.remove(keys)

    def counts(self) -> tuple[Tensor, Tensor]:
        """All keys that are counted, ascending, and for each its count and the step in which that last rose [n, 2]."""
        keys, _ = self._entries.items()
        counts, last, _ = self._counts(keys)
        kept = where(counts > 0)
        return keys[kept], torch.stack([counts[kept], last[kept]], 1)

    def restore(self, keys: Tensor, counts: Tensor) -> None:
        """Know of these keys besides those known; `counts` [n, 2] as `counts` gives them."""
        self._entries.insert(keys, counts[:, 1] << COUNT_BITS | counts[:, 0])

    def clear(self) -> None:
        """Have counted nothing."""
        self._entries = self._new_hash_map()
        self._num_swept = 0
        self.step = 1
        self._is_open = False

    def _counts(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each key [n] its count, the step in which it last rose (0: never), and the count that admits it."""
        entries, thresholds = self._entries.lookup(keys).clamp_(min=0), self._thresholds(keys)
        counts, last = entries & MAX_COUNT, entries >> COUNT_BITS
        if self._options.age is not None:
            counts[(self.step - last > self._options.age) & (counts < thresholds)] = 0
        return counts, last, thresholds

    def _sweep(self) -> None:
        """Give back the memory of counts that have expired."""
        keys, counts = self.counts()
        self._entries = self._new_hash_map(len(keys))
        self.restore(keys, counts)
        self._num_swept = len(keys)

    def _thresholds(self, keys: Tensor) -> Tensor:
        if self._options.name == "count":
            return torch.full((len(keys),), self._options.count)
        if self._options.name == "always" or self._options.probability == 1.0:
            return torch.zeros(len(keys), dtype=torch.int64)
        unit = (logical_shift_right(splitmix64(splitmix64(keys + self._key) + GAMMA), 11).double() + 0.5) * 2.0**-53
        return (unit.log() / math.log1p(-self._options.probability)).ceil().clamp(1, MAX_COUNT).long()
