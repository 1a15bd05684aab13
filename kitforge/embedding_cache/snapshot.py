"""Snapshots of a table at a step boundary, read by another thread while training goes on; and restoring from one.

Rows stay in their tiers. A row that is about to change and has not been read yet is copied first (copy-on-write).
"""

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.hash_map.reference import HashMapKernel
from kitforge.core.optim.row_optimizers import RowLayout
from kitforge.core.optim.table_protocols import ROWS, RowSource
from kitforge.core.parallel.table import owner
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.changes import RowsAt
from kitforge.embedding_cache.keys.slot_map import grow_rows
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.foundation.errors import CheckpointError

# Rows read at a time; planning waits meanwhile.
CHUNK_ROWS = 2**14
ADMISSION = "admission"
COLUMN_PART = re.compile(r"rows-(\d+)-(\d+)")


class TableSnapshot:
    """A `core.optim.table_protocols.RowSource`. Another thread than the training's may call `chunks` and `close`."""

    def __init__(
        self,
        rows: RowCache,
        schema: Mapping[str, Any],
        sharding: TableSharding | None,
        since: int | None,
        *,
        is_base: bool,
    ) -> None:
        """`since`: the version whose later changes it holds; None: all rows. `is_base`: the next snapshot may build on
        this one. Made within `RowCache.exclusive`."""
        changed, removed = (None, None) if since is None else rows.changes.changes(since)
        rows.changes.restart(rows.num_steps if is_base else None)
        self.schema, self.version, self.since, self.state = schema, rows.num_steps, since, rows.state()
        self.shard: tuple[int, int] = (0, 1) if sharding is None else sharding.shard
        self._part = _part_name(None if sharding is None else sharding.columns)
        # Whether this rank saves the rows; else another rank saves the same ones.
        self._saves_rows = sharding is None or sharding.saves_rows
        self._counts = None if rows.admission.admits_all else rows.admission.counts()
        self.parts: tuple[str, ...] = (self._part,) if self._counts is None else (self._part, ADMISSION)
        self._removed, self._rows = removed, rows
        self._lock = threading.Lock()
        new_hash_map = select_table().hash_map
        self._read: HashMapKernel = new_hash_map()
        self._copies = _CopiedRows(new_hash_map(), rows.layout.width)
        self._changed: HashMapKernel | None = None
        # The keys to read first: those that changed, or those in memory, since those below do not move up by then.
        self._first_keys = changed
        if changed is not None:
            self._changed = new_hash_map(len(changed))
            self._changed.insert(changed, torch.zeros_like(changed))
        elif self._saves_rows:
            index, host = rows.device.index, rows.tiers.upper
            host_keys = [] if host is None else list(host.keys(2**20))
            self._first_keys = torch.cat([index.keys_at(index.used()), *host_keys])
        if self._saves_rows:
            rows.changes.observers = [*rows.changes.observers, self._copy_before_write]

    def chunks(self, part: str = ROWS) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowSource`. Rows that were never updated are left out: they are as they are initialized."""
        if part == ADMISSION and self._counts is not None and self._saves_rows:
            keys, counts = self._counts
            yield from zip(torch.split(keys, CHUNK_ROWS), torch.split(counts, CHUNK_ROWS), strict=True)
        elif part == self._part and self._first_keys is not None and self._saves_rows:
            yield from self._row_chunks(self._first_keys)

    def removed(self) -> Iterator[Tensor]:
        """See `RowSource`."""
        return iter(() if self._removed is None or not self._saves_rows else (self._removed,))

    def close(self) -> None:
        """See `RowSource`."""
        changes = self._rows.changes
        changes.observers = [each for each in changes.observers if each != self._copy_before_write]
        with self._lock:
            self._copies = _CopiedRows(select_table().hash_map(), self._rows.layout.width)

    def _row_chunks(self, first_keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for keys in torch.split(first_keys, CHUNK_ROWS):
            yield from self._chunk(keys)
        # All keys of changes are known; of a whole table the lower store lists the others.
        lower = self._rows.tiers.lower
        for keys in () if lower is None or self._changed is not None else lower.keys(CHUNK_ROWS):
            yield from self._chunk(keys)
        # Rows that were below and expired since.
        with self._lock:
            copied = self._copies.positions.items()[0]
        for keys in torch.split(copied, CHUNK_ROWS):
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
            lower = self._rows.tiers.lower
            was_below = torch.zeros(len(missing), dtype=torch.bool)
            if lower is not None:
                was_below = lower.read(keys[missing], below)
            with self._lock:
                # A row that was fetched and has changed meanwhile was copied before.
                is_copied = self._copies.read(keys[missing], below)
                self._read.insert(keys[missing], torch.zeros_like(missing))
            rows[missing] = below
            hits[missing] = was_below | is_copied
        wanted = hits & self._is_wanted(rows)
        if bool(wanted.any()):
            yield keys[wanted], rows[wanted]

    def _read_memory(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Read the rows that were copied or are in the device or host tier; the others stay below unchanged."""
        device, host = self._rows.device, self._rows.tiers.upper
        with self._rows.exclusive(), device.slab_lock, self._lock:
            hits = self._copies.read(keys, rows)
            slots = device.index.lookup(keys)
            here = ((slots >= 0) & ~hits).nonzero().squeeze(1)
            rows[here] = device.rows(slots[here])
            hits[here] = True
            missing = (~hits).nonzero().squeeze(1)
            if len(missing) and host is not None:
                below = torch.empty(len(missing), rows.shape[1])
                in_host = host.read(keys[missing], below)
                rows[missing[in_host]] = below[in_host]
                hits[missing[in_host]] = True
            self._read.insert(keys[hits], torch.zeros_like(keys[hits]))
        return hits

    def _is_wanted(self, rows: Tensor) -> Tensor:
        layout = self._rows.layout
        counters = layout.as_integers(rows)
        has_moved = counters[:, layout.updates] > 0
        if self.since is None:
            return has_moved
        # Adam moves rows without a gradient; `last_step` of such a row is the step before the one that reads it.
        since = self.since - int(self._rows.optimizer.moves_untouched_rows)
        return has_moved & (counters[:, layout.last_step] > since)

    def _copy_before_write(self, keys: Tensor, rows_at: RowsAt) -> None:
        with self._lock:
            is_wanted = (self._read.lookup(keys) < 0) & (self._copies.positions.lookup(keys) < 0)
            if self._changed is not None:
                is_wanted &= self._changed.lookup(keys) >= 0
            positions = is_wanted.nonzero().squeeze(1)
            if len(positions):
                self._copies.add(keys[positions], rows_at(positions))


class _CopiedRows:
    """Rows as they were at the snapshot, by key."""

    def __init__(self, positions: HashMapKernel, width: int) -> None:
        self.positions = positions
        self._rows = torch.empty(0, width)

    def add(self, keys: Tensor, rows: Tensor) -> None:
        """Insert rows of new keys."""
        start = len(self.positions)
        if start + len(keys) > len(self._rows):
            self._rows = grow_rows(self._rows, max(2 * len(self._rows), start + len(keys)))
        self._rows[start : start + len(keys)] = rows
        self.positions.insert(keys, torch.arange(start, start + len(keys)))

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy the rows found into `out`; their mask."""
        positions = self.positions.lookup(keys)
        hits = positions >= 0
        out[hits] = self._rows[positions[hits]]
        return hits


def _part_name(columns: slice | None) -> str:
    """The name of the part of a checkpoint with rows of these columns."""
    return ROWS if columns is None else f"{ROWS}-{columns.start}-{columns.stop}"


def restore(rows: RowCache, source: RowSource, sharding: TableSharding | None) -> None:
    """Replace the rows by those of `source` that belong to this rank, whatever its number of ranks, tiers and sharding.

    Raises ConfigError while lookups are open, CheckpointError for rows of an unknown part.
    """
    columns = None if sharding is None else sharding.columns
    rank, num_ranks = (0, 1) if sharding is None else sharding.shard
    with rows.exclusive():
        rows.clear()
        rows.num_steps = int(source.state["steps"])
        if "rates" in source.state:
            rates = source.state["rates"]
            rows.rates = torch.cat([rates, torch.zeros(len(rates) + 1, dtype=torch.float64)])
        if "admission" in source.state:
            rows.admission.step = int(source.state["admission"])
        if sharding is not None and not sharding.holds_ids:
            return
        # Counts last, after all rows.
        for part in sorted(source.parts, key=lambda part: part == ADMISSION):
            for keys, records in source.chunks(part):
                if num_ranks > 1:
                    mine = owner(keys, num_ranks) == rank
                    keys, records = keys[mine], records[mine]
                if part == ADMISSION:
                    rows.admission.restore(keys, records)
                elif part == _part_name(columns):
                    rows.insert_rows(keys, records)
                else:
                    _insert_columns(rows, keys, records, (part, columns or slice(0, rows.config.dim)))


def _insert_columns(rows: RowCache, keys: Tensor, records: Tensor, which: tuple[str, slice]) -> None:
    """Copy into the rows here those columns that the records of a part with other columns share with them."""
    part, own = which
    match = COLUMN_PART.fullmatch(part)
    if part != ROWS and match is None:
        raise CheckpointError("rows of an unknown part", got=part, expected="rows, or rows-FROM-TO")
    there = slice(0, rows.config.dim) if match is None else slice(int(match[1]), int(match[2]))
    start, stop = max(own.start, there.start), min(own.stop, there.stop)
    if start >= stop:
        return
    mixed = torch.empty(len(keys), rows.layout.width)
    rows.peek(keys, mixed)
    full, to, given = (
        rows.optimizer.layout(each.stop - each.start) for each in (slice(0, rows.config.dim), own, there)
    )
    for field, to_field, given_field in zip(*map(_fields, (full, to, given)), strict=True):
        if field.stop - field.start == full.dim:
            into = slice(to_field.start + start - own.start, to_field.start + stop - own.start)
            outof = slice(given_field.start + start - there.start, given_field.start + stop - there.start)
            mixed[:, into] = records[:, outof]
        else:
            mixed[:, to_field] = records[:, given_field]
    rows.insert_rows(keys, mixed)


def _fields(layout: RowLayout) -> list[slice]:
    """The embedding, every state, and the integers at the end."""
    end = max([layout.dim, *(state.stop for state in layout.states.values())])
    return [slice(0, layout.dim), *layout.states.values(), slice(end, layout.width)]
