"""Everything below the device tier, as one place from which rows come and to which they go.

A row is in the host tier or below it; what the lower tiers hold of a row that is further up counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.copy_rows.reference import CopyRowsKernel
from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.indexing import at, where
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.row_init import RowInitializer
from kitforge.embedding_cache.stats import TableCounters
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.two_level import TwoLevelStore
from kitforge.embedding_cache.tiers.write_behind import WriteBehindStore
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerTiers:
    """The tiers below the device: a host tier, and below it one store, of which either may be missing."""

    host: HostStore | None
    store: RowStore | None
    store_name: str  # file or remote, for the counts
    move_rows: CopyRowsKernel


@final
class TierHierarchy:
    """Fetches rows from the highest tier that has them, or begins them; takes back those that leave the device.

    The host tier gives a row away when it goes up. The store below keeps its copy, so a row that comes back unchanged
    needs no write.
    """

    def __init__(self, lower: LowerTiers, row_initializer: RowInitializer, counts: TableCounters) -> None:
        self._host, self._store, self._store_name = lower.host, lower.store, lower.store_name
        self._row_initializer, self._move_rows = row_initializer, lower.move_rows
        self._counts = counts
        self.width = row_initializer.layout.width

    @property
    def is_empty(self) -> bool:
        """Whether there is no tier here at all."""
        return self._host is None and self._store is None

    def fetch(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Fill `out` [n, width] with the rows of `keys` [n]; one that no tier has begins here.

        Returns the mask [n] of those that are nowhere else as they are, and the places of those that begin.
        """
        is_missing, dirty = torch.ones(len(keys), dtype=torch.bool), torch.zeros(len(keys), dtype=torch.bool)
        if self._host is not None:
            hits, dirty = self._host.take_with_dirty(keys, out)
            is_missing = ~hits
        missing = where(is_missing)
        self._counts.count_hits("host", len(keys) - len(missing))
        if self._store is not None and len(missing):
            still_missing = at(missing, where(~self._read_part(self._store, keys, missing, out)))
            self._counts.count_hits(self._store_name, len(missing) - len(still_missing))
            missing = still_missing
        if len(missing) == len(keys):
            self._row_initializer.fill(keys, out)
        elif len(missing):
            rows = torch.empty(len(missing), self.width)
            self._row_initializer.fill(at(keys, missing), rows)
            self._move_rows(rows, out, to=missing)
        self._counts.count_hits("new", len(missing))
        return dirty, missing

    def exchange(self, device: DeviceTier, slots: Tensor, positions: Tensor) -> None:
        """Rows at `slots` [n] of the device and at `places` [n] of the host tier change places."""
        if self._host is not None and len(slots):
            self._host.exchange(positions, device, slots)
            self._counts.count_hits("host", len(slots))
            self._counts.count_moved("host", len(slots), self.width)

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """Take rows that leave the device; those not `dirty` may be dropped."""
        if self._host is None:
            self._put_below(keys[dirty], rows[dirty])
            return
        capacity = self._host.capacity
        if capacity is not None:
            if len(keys) > capacity:
                self._put_below(keys[capacity:][dirty[capacity:]], rows[capacity:][dirty[capacity:]])
                keys, rows, dirty = keys[:capacity], rows[:capacity], dirty[:capacity]
            over = len(self._host) + len(keys) - capacity
            if over > 0:
                self._put_below(*self._host.evict_oldest(over))
        self._host.put(keys, rows, dirty)
        self._counts.count_moved("host", len(keys), self.width)

    def peek_host(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy rows of the host tier without moving them; a mask of those found."""
        return _no_hits(keys) if self._host is None else self._host.read(keys, out)

    def peek_store(self, keys: Tensor, out: Tensor) -> Tensor:
        """The same of the store below."""
        return _no_hits(keys) if self._store is None else self._store.read(keys, out)

    def host_keys(self) -> list[Tensor]:
        """The keys of the host tier, if there is one."""
        return [] if self._host is None else list(self._host.keys(2**20))

    def store_keys(self, chunk: int) -> Iterator[Tensor]:
        """The keys of the store below. Those that come or move while this runs may be left out, or come twice."""
        return iter(()) if self._store is None else self._store.keys(chunk)

    def delete(self, keys: Tensor) -> None:
        """Let go of rows in all tiers."""
        for tier in self._tiers():
            tier.delete(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows here, each as the highest of these tiers has it; some may be further up as well."""
        if self._host is not None:
            yield from self._host.scan(chunk)
        if self._store is None:
            return
        for keys, rows in self._store.scan(chunk):
            if self._host is None:
                yield keys, rows
            else:
                is_above = self._host.read(keys, torch.empty(len(keys), self.width))
                yield keys[~is_above], rows[~is_above]

    def clear(self) -> None:
        """Let go of all rows."""
        for tier in self._tiers():
            for keys in [keys.clone() for keys, _ in tier.scan(2**16)]:
                tier.delete(keys)

    def flush(self) -> None:
        """See `RowStore`."""
        for tier in self._tiers():
            tier.flush()

    def close(self) -> None:
        """See `RowStore`."""
        for tier in self._tiers():
            tier.close()

    def num_rows(self) -> dict[str, int]:
        """Rows by tier; the lower may hold old copies of what is further up."""
        host = {"host": len(self._host)} if self._host is not None else {}
        return host | ({} if self._store is None else self._store.num_rows(self._store_name))

    def _put_below(self, keys: Tensor, rows: Tensor) -> None:
        if self._store is not None and len(keys):
            self._store.write(keys, rows)
            self._counts.count_moved(self._store_name, len(keys), self.width)

    def _read_part(self, store: RowStore, keys: Tensor, positions: Tensor, out: Tensor) -> Tensor:
        """Read the rows of keys[places] to these places of `out`; a mask over `places` of those found."""
        if len(positions) == len(keys):
            return store.read(keys, out)
        rows = torch.empty(len(positions), store.width)
        hits = store.read(at(keys, positions), rows)
        self._move_rows(rows, out, at=where(hits), to=at(positions, where(hits)))
        return hits

    def _tiers(self) -> list[RowStore]:
        return [tier for tier in (self._host, self._store) if tier is not None]


def build_hierarchy(
    options: CachedEmbeddingOptions,
    row_initializer: RowInitializer,
    device: DeviceTier,
    counts: TableCounters,
    rank: int,
) -> TierHierarchy:
    """The tiers below `device` that `options` name; `rank` keeps the files of ranks apart."""
    width, kernels = row_initializer.layout.width, select_table()  # of main memory, wherever the device is
    store = options.remote if isinstance(options.remote, RowStore) else None
    if store is not None:
        check(store.width == width, "cache.remote", f"rows of {store.width} numbers", f"rows of {width}")
    store_name = "remote"
    if options.path is not None:
        file = FileStore(Path(options.path), f"{options.name}-{rank}", width, kernels)
        store_name = "file"
        store = file if store is None or options.file_rows is None else TwoLevelStore(file, options.file_rows, store)
    host: HostStore | None = None
    has_host = options.host_rows != 0 if store is None else bool(options.host_rows)
    if options.device_rows is not None and has_host:
        host = HostStore(width, kernels, options.host_rows, device)
    behind = None if store is None else WriteBehindStore(store)
    lower = LowerTiers(host=host, store=behind, store_name=store_name, move_rows=kernels.copy_rows)
    return TierHierarchy(lower, row_initializer, counts)


def _no_hits(keys: Tensor) -> Tensor:
    return torch.zeros(len(keys), dtype=torch.bool)
