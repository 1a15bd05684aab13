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

from kitforge.core.kernels.dispatch import HashMap, select_table
from kitforge.embedding_cache.free_slots import grown
from kitforge.embedding_cache.row_cache import RowCache
from kitforge.embedding_cache.watchers import RowsAt

# Rows read at a time; moving rows waits meanwhile.
CHUNK = 2**14
ADMISSION = "admission"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moment:
    """What is known of a boundary at once."""

    schema: Mapping[str, Any]
    version: int  # steps made so far
    since: int | None
    state: Mapping[str, Tensor]
    share: tuple[int, int]
    part: str  # the name under which the rows go
    counted: tuple[Tensor, Tensor] | None  # keys [n] and counts [n, 2] of admission
    changed: Tensor | None  # distinct keys that changed after `since`, some of which may be gone; None: all rows
    removed: Tensor | None  # distinct keys that went after `since`
    yields: bool  # whether the rows here are this rank's to give, not another's as well


@final
class Boundary:
    """A `core.optim.rows.RowSource`. Made while nothing changes; another thread may call `chunks` and `close`."""

    def __init__(self, rows: RowCache, moment: Moment) -> None:
        self._rows, self._moment = rows, moment
        self._lock = threading.Lock()
        new_hash_map = select_table().hash_map
        self._read: HashMap = new_hash_map()
        self._kept = _KeptRows(new_hash_map(), rows.layout.width)
        self._changed: HashMap | None = None
        if moment.changed is not None:
            self._changed = new_hash_map(len(moment.changed))
            self._mark(self._changed, moment.changed)
        device = rows.device.index
        self._top = moment.changed
        if moment.changed is None and moment.yields:
            self._top = torch.cat([device.keys_at(device.used()), *rows.ladder.host_keys()])
        if moment.yields:
            rows.watchers.add(self._keep)

    @property
    def schema(self) -> Mapping[str, Any]:
        """See `RowSource`."""
        return self._moment.schema

    @property
    def version(self) -> int:
        """See `RowSource`: steps made so far."""
        return self._moment.version

    @property
    def since(self) -> int | None:
        """See `RowSource`."""
        return self._moment.since

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See `RowSource`: the number of steps, and the rates of all steps where rows that rest need them."""
        return self._moment.state

    @property
    def share(self) -> tuple[int, int]:
        """See `RowSource`."""
        return self._moment.share

    @property
    def parts(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return (self._moment.part,) if self._moment.counted is None else (self._moment.part, ADMISSION)

    def chunks(self, part: str = "rows") -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowSource`. Rows that never moved are left out: they are as they begin."""
        if part == ADMISSION and self._moment.counted is not None and self._moment.yields:
            keys, counts = self._moment.counted
            yield from zip(torch.split(keys, CHUNK), torch.split(counts, CHUNK), strict=True)
        elif part == self._moment.part and self._top is not None and self._moment.yields:
            yield from self._row_chunks(self._top)

    def removed(self) -> Iterator[Tensor]:
        """See `RowSource`."""
        removed = self._moment.removed
        return iter(() if removed is None or not self._moment.yields else (removed,))

    def close(self) -> None:
        """See `RowSource`."""
        self._rows.watchers.remove(self._keep)
        with self._lock:
            self._kept.clear()

    def _row_chunks(self, top: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for keys in torch.split(top, CHUNK):
            yield from self._chunk(keys)
        # Of changes all keys are known; of a whole table those below are asked for.
        for keys in self._rows.ladder.store_keys(CHUNK) if self._changed is None else ():
            yield from self._chunk(keys)
        # Those that were below and have been forgotten since.
        with self._lock:
            kept = self._kept.keys()
        for keys in torch.split(kept, CHUNK):
            yield from self._chunk(keys)
        self.close()

    def _chunk(self, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        with self._lock:
            keys = keys[self._read.lookup(keys) < 0]
        rows = torch.empty(len(keys), self._rows.layout.width)
        found = self._read_memory(keys, rows)
        missing = (~found).nonzero().squeeze(1)
        if len(missing):
            below = torch.empty(len(missing), self._rows.layout.width)
            was_below = self._rows.ladder.peek_store(keys[missing], below)
            with self._lock:
                # One that was fetched and has changed meanwhile was kept before that.
                is_kept = self._kept.read(keys[missing], below)
                self._mark(self._read, keys[missing])
            rows[missing] = below
            found[missing] = was_below | is_kept
        wanted = found & self._is_wanted(rows)
        if bool(wanted.any()):
            yield keys[wanted], rows[wanted]

    def _read_memory(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Read what was kept or is in the device or host tier now; the others are below and stay there unchanged."""
        cache = self._rows
        with cache.interrupt(), cache.device.using(), self._lock:
            found = self._kept.read(keys, rows)
            slots = cache.device.index.lookup(keys)
            here = ((slots >= 0) & ~found).nonzero().squeeze(1)
            rows[here] = cache.device.rows(slots[here])
            found[here] = True
            missing = (~found).nonzero().squeeze(1)
            if len(missing):
                below = torch.empty(len(missing), rows.shape[1])
                in_host = cache.ladder.peek_host(keys[missing], below)
                rows[missing[in_host]] = below[in_host]
                found[missing[in_host]] = True
            self._mark(self._read, keys[found])
        return found

    def _is_wanted(self, rows: Tensor) -> Tensor:
        layout = self._rows.layout
        counters = layout.whole(rows)
        has_moved = counters[:, layout.updates] > 0
        if self._moment.since is None:
            return has_moved
        # What dense Adam does to rows that rest is told of the step before the one in which they are read.
        since = self._moment.since - int(self._rows.optimizer.moves_untouched_rows)
        return has_moved & (counters[:, layout.last_step] > since)

    def _mark(self, marks: HashMap, keys: Tensor) -> None:
        marks.insert(keys, torch.zeros(len(keys), dtype=torch.int64))

    def _keep(self, keys: Tensor, rows_at: RowsAt) -> None:
        with self._lock:
            is_wanted = (self._read.lookup(keys) < 0) & ~self._kept.has(keys)
            if self._changed is not None:
                is_wanted &= self._changed.lookup(keys) >= 0
            places = is_wanted.nonzero().squeeze(1)
            if len(places):
                self._kept.add(keys[places], rows_at(places))


@final
class _KeptRows:
    """Rows as they were, by key."""

    def __init__(self, places: HashMap, width: int) -> None:
        self._places = places
        self._rows = torch.empty(0, width)

    def has(self, keys: Tensor) -> Tensor:
        """Which of these keys are here."""
        return self._places.lookup(keys) >= 0

    def add(self, keys: Tensor, rows: Tensor) -> None:
        """Keep rows whose keys are not here."""
        start = len(self._places)
        if start + len(keys) > len(self._rows):
            self._rows = grown(self._rows, max(2 * len(self._rows), start + len(keys)))
        self._rows[start : start + len(keys)] = rows
        self._places.insert(keys, torch.arange(start, start + len(keys)))

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy what is here into `out`; which that was."""
        places = self._places.lookup(keys)
        found = places >= 0
        out[found] = self._rows[places[found]]
        return found

    def keys(self) -> Tensor:
        """All keys that are here."""
        return self._places.items()[0]

    def clear(self) -> None:
        """Keep nothing."""
        self._rows = self._rows[:0]
        self._places.remove(self.keys())
