"""Which ids get a row of their own."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import NewHashMap
from kitforge.core.parallel.table import GAMMA, mix, shifted
from kitforge.embedding_cache.options import AdmissionOptions
from kitforge.foundation import seed as seeds


@final
class Admission:
    """An id is admitted from its n-th training lookup on, where n is the same for all or drawn for each.

    To admit with probability p at every lookup is to draw n from a geometric distribution; n is a pure function of
    (seed, table, id), so it depends on no order.
    """

    def __init__(self, options: AdmissionOptions, new_hash_map: NewHashMap, seed: int, table: str) -> None:
        self._options = options
        self._key = seeds.key(seed, "admission", table)
        self._new_hash_map = new_hash_map
        self._seen = new_hash_map()

    @property
    def admits_all(self) -> bool:
        """Whether nothing has to be counted."""
        return self._options.name == "always"

    def observe(self, keys: Tensor) -> Tensor:
        """Count one more training lookup of each of these distinct keys; which of them have a row by now."""
        counts = self._counts(keys) + 1
        self._seen.insert(keys, counts)
        return counts >= self._thresholds(keys)

    def admitted(self, keys: Tensor) -> Tensor:
        """Which of these keys have a row, without counting."""
        return self._counts(keys) >= self._thresholds(keys)

    def retract(self, keys: Tensor) -> None:
        """Undo one `observe` of these keys: the lookup did not take place."""
        counts = self._counts(keys) - 1
        self._seen.insert(keys[counts > 0], counts[counts > 0])
        self._seen.remove(keys[counts <= 0])

    def counts(self) -> tuple[Tensor, Tensor]:
        """All keys that were ever counted, ascending, and their counts."""
        return self._seen.items()

    def restore(self, keys: Tensor, counts: Tensor) -> None:
        """Know of these keys besides those known."""
        self._seen.insert(keys, counts)

    def clear(self) -> None:
        """Have counted nothing."""
        self._seen = self._new_hash_map()

    def _counts(self, keys: Tensor) -> Tensor:
        return self._seen.lookup(keys).clamp_(min=0)

    def _thresholds(self, keys: Tensor) -> Tensor:
        if self._options.name == "count":
            return torch.full((len(keys),), self._options.count)
        if self._options.name == "always" or self._options.probability == 1.0:
            return torch.zeros(len(keys), dtype=torch.int64)
        unit = (shifted(mix(mix(keys + self._key) + GAMMA), 11).double() + 0.5) * 2.0**-53
        return (unit.log() / math.log1p(-self._options.probability)).ceil().clamp(1, 2**62).long()
