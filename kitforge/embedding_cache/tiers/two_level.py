"""Two stores as one: a small fast one above a large slow one. Host memory over a file, a file over a server."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.tables.indexing import at, where
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.stats import TableCounters
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.slab_store import SlabStore
from kitforge.embedding_cache.tiers.write_behind import WriteBehindStore
from kitforge.foundation.config import check


class TwoLevelStore(RowStore):
    """At most `upper.capacity` rows in the upper store, those used last; the others in the lower store.

    Either store may be missing. Where both hold a row, the upper one is current and the lower one is an old copy. With
    `counts`, hits and moves are counted under the names `host` and `lower_name`.
    """

    def __init__(
        self,
        upper: SlabStore | None,
        lower: RowStore | None,
        *,
        lower_name: str = "remote",
        counts: TableCounters | None = None,
    ) -> None:
        self.upper, self.lower, self._lower_name = upper, lower, lower_name
        self._counts = TableCounters() if counts is None else counts
        self._copy_rows = select_table().copy_rows
        self.levels: list[RowStore] = [store for store in (upper, lower) if store is not None]
        self.width = self.levels[0].width if self.levels else 0

    def __len__(self) -> int:
        return sum(len(keys) for keys, _ in self.scan(2**16))

    def num_rows(self, name: str) -> dict[str, int]:
        above = {} if self.upper is None else self.upper.num_rows(name)
        return above if self.lower is None else above | self.lower.num_rows(self._lower_name)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        hits = torch.zeros(len(keys), dtype=torch.bool) if self.upper is None else self.upper.read(keys, out)
        missing = where(~hits)
        hits[missing] = self._read_lower(keys, missing, out)
        return hits

    def fetch(self, keys: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Fill `out` [n, width] with the rows of `keys` [n] for the device tier. The host tier gives its rows away; the
        lower store keeps its copy, so a row that comes back unchanged needs no write.

        Returns the mask [n] of the rows that no store has in this state, and the positions of the keys not found.
        """
        missing, dirty = torch.arange(len(keys)), torch.zeros(len(keys), dtype=torch.bool)
        if self.upper is not None:
            assert isinstance(self.upper, HostStore)
            hits, dirty = self.upper.take(keys, out)
            missing = where(~hits)
            self._counts.hits["host"] += len(keys) - len(missing)
        if self.lower is not None and len(missing):
            left = at(missing, where(~self._read_lower(keys, missing, out)))
            self._counts.hits[self._lower_name] += len(missing) - len(left)
            missing = left
        return dirty, missing

    def write(self, keys: Tensor, rows: Tensor) -> None:
        self.put(keys, rows, torch.ones(len(keys), dtype=torch.bool))

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """`write`, where rows that are not `dirty` [n] may be dropped: a store has them already."""
        if self.upper is None:
            self._write_lower(keys[dirty], rows[dirty])
            return
        capacity = self.upper.capacity
        if capacity is not None and len(keys) > capacity:
            rest = slice(capacity, None)
            self._write_lower(keys[rest][dirty[rest]], rows[rest][dirty[rest]])
            self.upper.delete(keys[rest])
            keys, rows, dirty = keys[:capacity], rows[:capacity], dirty[:capacity]
        if capacity is not None and len(self.upper) + len(keys) > capacity:
            self.upper.spill(len(self.upper) + len(keys) - capacity, self._write_lower)
        self.upper.put(keys, rows, dirty)
        self._counts.moved["host"] += len(keys)

    def delete(self, keys: Tensor) -> None:
        for store in self.levels:
            store.delete(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self.upper is not None:
            yield from self.upper.scan(chunk)
        for keys, rows in () if self.lower is None else self.lower.scan(chunk):
            if self.upper is not None:
                is_lower = ~self.upper.read(keys, torch.empty(len(keys), self.width))
                yield keys[is_lower], rows[is_lower]
            else:
                yield keys, rows

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """See `RowStore`. While this runs, rows move from the upper to the lower store only, so none is missed."""
        for store in self.levels:
            yield from store.keys(chunk)

    def close(self) -> None:
        for store in self.levels:
            store.close()

    def _read_lower(self, keys: Tensor, positions: Tensor, out: Tensor) -> Tensor:
        """Read the rows of keys[positions] into out[positions]; the mask of those found over `positions`."""
        if self.lower is None:
            return torch.zeros(len(positions), dtype=torch.bool)
        if len(positions) == len(keys):
            return self.lower.read(keys, out)
        rows = torch.empty(len(positions), self.width)
        hits = self.lower.read(at(keys, positions), rows)
        found = where(hits)
        self._copy_rows(rows, out, at=found, to=at(positions, found))
        return hits

    def _write_lower(self, keys: Tensor, rows: Tensor) -> None:
        if self.lower is not None and len(keys):
            self.lower.write(keys, rows)
            self._counts.moved[self._lower_name] += len(keys)


def build_tiers(
    options: CachedEmbeddingOptions, width: int, device: DeviceTier, counts: TableCounters, rank: int
) -> TwoLevelStore:
    """The tiers below `device` that `options` name, for rows of `width` numbers; `rank` keeps the files of ranks
    apart."""
    kernels = select_table()  # of main memory, wherever the device is
    store = options.remote if isinstance(options.remote, RowStore) else None
    if store is not None:
        check(store.width == width, "cache.remote", f"rows of {store.width} numbers", f"rows of {width}")
    lower_name = "remote"
    if options.path is not None:
        file = FileStore(Path(options.path), f"{options.name}-{rank}", width, kernels, options.file_rows)
        store = file if store is None else TwoLevelStore(file, store)
        lower_name = "file"
    has_host = options.host_rows != 0 if store is None else bool(options.host_rows)
    host = None
    if options.device_rows is not None and has_host:
        host = HostStore(width, kernels, options.host_rows, device)
    behind = None if store is None else WriteBehindStore(store)
    return TwoLevelStore(host, behind, lower_name=lower_name, counts=counts)
