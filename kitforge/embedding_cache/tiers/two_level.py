"""A file tier of limited size above a store that holds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.file import FileStore


@final
class TwoLevelStore(RowStore):
    """At most `capacity` rows in the upper store, those used last; where both have a row, the upper one's counts."""

    def __init__(self, upper: FileStore, capacity: int, lower: RowStore) -> None:
        self.width = upper.width
        self._upper, self._capacity, self._lower = upper, capacity, lower

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self.scan(2**16))

    def num_rows(self, name: str) -> dict[str, int]:
        """See `RowStore`."""
        return self._upper.num_rows(name) | self._lower.num_rows("remote")

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        hits = self._upper.read(keys, out)
        missing = (~hits).nonzero().squeeze(1)
        rows = torch.empty(len(missing), self.width)
        below = self._lower.read(keys[missing], rows)
        out[missing[below]] = rows[below]
        hits[missing[below]] = True
        return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """See `RowStore`."""
        for start in range(0, len(keys), self._capacity):
            part = slice(start, start + self._capacity)
            self._spill(len(self._upper) + len(keys[part]) - self._capacity)
            self._upper.write(keys[part], rows[part])

    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        hits = self.read(keys, out)
        self.delete(keys[hits])
        return hits

    def delete(self, keys: Tensor) -> None:
        """See `RowStore`."""
        self._upper.delete(keys)
        self._lower.delete(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowStore`."""
        yield from self._upper.scan(chunk)
        for keys, rows in self._lower.scan(chunk):
            is_above = self._upper.read(keys, torch.empty(len(keys), self.width))
            yield keys[~is_above], rows[~is_above]

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """See `RowStore`. Rows move from the upper to the lower store only, so none is overlooked."""
        yield from self._upper.keys(chunk)
        yield from self._lower.keys(chunk)

    def flush(self) -> None:
        """See `RowStore`."""
        self._upper.flush()
        self._lower.flush()

    def close(self) -> None:
        """See `RowStore`."""
        self._upper.close()
        self._lower.close()

    def _spill(self, num: int) -> None:
        if num <= 0:
            return
        keys = self._upper.least_recently_used(num)
        rows = torch.empty(len(keys), self.width)
        self._upper.read(keys, rows)
        self._lower.write(keys, rows)
        self._upper.delete(keys)
