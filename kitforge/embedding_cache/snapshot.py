"""A table as it was at one step boundary, read by another thread while the training goes on.

Rows stay where they are. One that is about to change and has not been read yet is copied first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.hash_map.reference import HashMapKernel
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.copy_on_write import RowsAt
from kitforge.embedding_cache.keys.free_list import grow_rows

# Rows read at a time; moving rows waits meanwhile.
CHUNK_ROWS = 2**14
ADMISSION = "admission"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotInfo:
    """What is known of a boundary at once."""

    schema: Mapping[str, Any]
    version: int  # steps made so far
    since: int | None
    state: Mapping[str, Tensor]
    shard: tuple[int, int]
    part: str  # the name under which the rows go
    admission_counts: tuple[Tensor, Tensor] | None  # keys [n] and counts [n, 2] of admission
    changed: Tensor | None  # distinct keys that changed after `since`, some of which may be gone; None: all rows
    removed: Tensor | None  # distinct keys that went after `since`
    saves_rows: bool  # whether the rows here are this rank's to give, not another's as well


@final
class TableSnapshot:
    """A `core.optim.rows.RowSource`. Made while nothing changes; another thread may call `chunks` and `close`."""

    def __init__(self, rows: RowCache, info: SnapshotInfo) -> None:
        self._rows, self._info = rows, info
        self._lock = threading.Lock()
        new_hash_map = select_table().hash_map
        self._read: HashMapKernel = new_hash_map()
        self._copies = _CopyOnWriteRows(new_hash_map(), rows.layout.width)
        self._changed: HashMapKernel | None = None
        if info.changed is not None:
            self._changed = new_hash_map(len(info.changed))
            self._mark(self._changed, info.changed)
        device = rows.device.index
        self._top = info.changed
        if info.changed is None and info.saves_rows:
            self._top = torch.cat([device.keys_at(device.used()), *rows.hierarchy.host_keys()])
        if info.saves_rows:
            rows.write_observers.add(self._copy_before_write)

    @property
    def schema(self) -> Mapping[str, Any]:
        """See `RowSource`."""
        return self._info.schema

    @property
    def version(self) -> int:
        """See `RowSource`: steps made so far."""
        return self._info.version

    @property
    def since(self) -> int | None:
        """See `RowSource`."""
        return self._info.since

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See `RowSource`: the number of steps, and the rates of all steps where rows that rest need them."""
        return self._info.state

    @property
    def shard(self) -> tuple[int, int]:
        """See `RowSource`."""
        return self._info.shard

    @property
    def parts(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return (self._info.part,) if self._info.admission_counts is None else (self._info.part, ADMISSION)

    def chunks(self, part: str = "rows") -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowSource`. Rows that never moved are left out: they are as they begin."""
        if part == ADMISSION and self._info.admission_counts is not None and self._info.saves_rows:
            keys, counts = self._info.admission_counts
            yield from zip(torch.split(keys, CHUNK_ROWS), torch.split(counts, CHUNK_ROWS), strict=True)
        elif part == self._info.part and self._top is not None and self._info.saves_rows:
            yield from self._row_chunks(self._top)

    def removed(self) -> Iterator[Tensor]:
        """See `RowSource`."""
        removed = self._info.removed
        return iter(() if removed is None or not self._info.saves_rows else (removed,))

    def close(self) -> None:
        """See `RowSource`."""
        self._rows.write_observers.remove(self._copy_before_write)
        with self._lock:
            self._copies.clear()

    def _row_chunks(self, top: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for keys in torch.split(top, CHUNK_ROWS):
            yield from self._chunk(keys)
        # Of changes all keys are known; of a whole table those below are asked for.
        for keys in self._rows.hierarchy.store_keys(CHUNK_ROWS) if self._changed is None else ():
            yield from self._chunk(keys)
        # Those that were below and have been forgotten since.
        with self._lock:
            kept = self._copies.keys()
        for keys in torch.split(kept, CHUNK_ROWS):
            yield from self._chunk(keys)
        self.close()

    def _chunk(self, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        with self._lock:
            keys = keys[self._read.lookup(keys) < 0]
        rows = torch.empty(len(keys), self._rows.layout.width)
        hits = self._read_memory(keys, rows)
        missing = (~hits).nonzero().squeeze(1)
        if len(missing):
            below = torch.empty(len(missing), self._rows.layout.width)
            was_below = self._rows.hierarchy.peek_store(keys[missing], below)
            with self._lock:
                # One that was fetched and has changed meanwhile was kept before that.
                is_kept = self._copies.read(keys[missing], below)
                self._mark(self._read, keys[missing])
            rows[missing] = below
            hits[missing] = was_below | is_kept
        wanted = hits & self._is_wanted(rows)
        if bool(wanted.any()):
            yield keys[wanted], rows[wanted]

    def _read_memory(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Read what was kept or is in the device or host tier now; the others are below and stay there unchanged."""
        cache = self._rows
        with cache.exclusive(), cache.device.using(), self._lock:
            hits = self._copies.read(keys, rows)
            slots = cache.device.index.lookup(keys)
            here = ((slots >= 0) & ~hits).nonzero().squeeze(1)
            rows[here] = cache.device.rows(slots[here])
            hits[here] = True
            missing = (~hits).nonzero().squeeze(1)
            if len(missing):
                below = torch.empty(len(missing), rows.shape[1])
                in_host = cache.hierarchy.peek_host(keys[missing], below)
                rows[missing[in_host]] = below[in_host]
                hits[missing[in_host]] = True
            self._mark(self._read, keys[hits])
        return hits

    def _is_wanted(self, rows: Tensor) -> Tensor:
        layout = self._rows.layout
        counters = layout.as_integers(rows)
        has_moved = counters[:, layout.updates] > 0
        if self._info.since is None:
            return has_moved
        # What dense Adam does to rows that rest is told of the step before the one in which they are read.
        since = self._info.since - int(self._rows.optimizer.moves_untouched_rows)
        return has_moved & (counters[:, layout.last_step] > since)

    def _mark(self, marks: HashMapKernel, keys: Tensor) -> None:
        marks.insert(keys, torch.zeros(len(keys), dtype=torch.int64))

    def _copy_before_write(self, keys: Tensor, rows_at: RowsAt) -> None:
        with self._lock:
            is_wanted = (self._read.lookup(keys) < 0) & ~self._copies.has(keys)
            if self._changed is not None:
                is_wanted &= self._changed.lookup(keys) >= 0
            positions = is_wanted.nonzero().squeeze(1)
            if len(positions):
                self._copies.add(keys[positions], rows_at(positions))


@final
class _CopyOnWriteRows:
    """Rows as they were, by key."""

    def __init__(self, positions: HashMapKernel, width: int) -> None:
        self._positions = positions
        self._rows = torch.empty(0, width)

    def has(self, keys: Tensor) -> Tensor:
        """Which of these keys are here."""
        return self._positions.lookup(keys) >= 0

    def add(self, keys: Tensor, rows: Tensor) -> None:
        """Keep rows whose keys are not here."""
        start = len(self._positions)
        if start + len(keys) > len(self._rows):
            self._rows = grow_rows(self._rows, max(2 * len(self._rows), start + len(keys)))
        self._rows[start : start + len(keys)] = rows
        self._positions.insert(keys, torch.arange(start, start + len(keys)))

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy what is here into `out`; which that was."""
        positions = self._positions.lookup(keys)
        hits = positions >= 0
        out[hits] = self._rows[positions[hits]]
        return hits

    def keys(self) -> Tensor:
        """All keys that are here."""
        return self._positions.items()[0]

    def clear(self) -> None:
        """Keep nothing."""
        self._rows = self._rows[:0]
        self._positions.remove(self.keys())
