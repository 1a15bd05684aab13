"""From 64-bit keys to the ids of an embedding table. Knows no files; a table's ids are shared by its features."""

from __future__ import annotations

from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.id_index import IdIndex
from kitforge.foundation.seed import key

MISSING, UNKNOWN = 0, 1


class IdEncoding(Protocol):
    """The ids of one embedding table."""

    @property
    def num_ids(self) -> int | None:
        """One more than the largest id; None where any int64 may occur."""
        ...

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        ...

    @property
    def missing(self) -> int:
        """The id of what is missing."""
        ...


@final
class HashEncoding:
    """So many buckets, salted by the table's name; bucket 0 is for what is missing alone."""

    def __init__(self, table: str, num_buckets: int) -> None:
        self.num_ids: int | None = num_buckets
        self.missing = MISSING
        self._salt = key("ids", table)
        self._modulus = np.uint64(num_buckets - 1)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        return (hash_array(keys.view(np.uint64), self._salt) % self._modulus).astype(np.int64) + 1


@final
class VocabularyEncoding:
    """The keys seen in training, from id 2 on by falling frequency; 1 for every other."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.num_ids: int | None = len(keys) + 2
        self.missing = MISSING
        self._index = IdIndex(keys)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        positions = self._index.find(keys)
        return np.where(positions < 0, UNKNOWN, positions + 2)


@final
class ExactEncoding:
    """The key itself. What is missing has a key of its own, which no other is likely to have."""

    def __init__(self, table: str) -> None:
        self.num_ids: int | None = None
        self.missing = key("missing", table)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        return keys.copy()
