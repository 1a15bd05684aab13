"""The file tier: rows in slots of one file, their keys in memory.

The file is scratch and has no name, so it goes with its process, however that ends, and nobody else can cut it short.
What shall last is a checkpoint's matter.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels
from kitforge.core.kernels.indexing import at, put, where
from kitforge.embedding_cache.eviction.score_queue import LowestScoreQueue
from kitforge.embedding_cache.keys.key_map import KeyMap
from kitforge.embedding_cache.keys.slot_table import SlotTable
from kitforge.embedding_cache.store import RowStore
from kitforge.foundation.errors import ConfigError, TrainingError

# Reads in flight at once where rows are not in the page cache: a disk serves many far faster than one after the other.
NUM_READERS = 32
# Rows looked at to tell whether the page cache has them.
NUM_SAMPLED = 24
# The file grows by a quarter of itself, from this many bytes on.
MIN_GROWTH_BYTES = 2**20


@final
class FileStore(RowStore):
    """Rows of the table `name` on the disk of `folder`. Room there is taken before anything is written to it.

    Raises ConfigError for a folder that cannot be, and TrainingError where the disk is full or does not give back what
    was written.
    """

    def __init__(self, folder: Path | str, name: str, width: int, kernels: TableKernels) -> None:
        self.width = width
        self._location = f"{folder}, for the rows of {name}"
        self._row_bytes = 4 * width
        self._lock = threading.Lock()
        self._index = SlotTable(KeyMap(kernels.hash_map, 0), 0)
        self._move_rows, self._read_rows = kernels.copy_rows, kernels.pread_rows
        self._clock = 0  # of the rows' last use: calls of `read` and `write`
        self._lru_queue = LowestScoreQueue()
        self._readers: ThreadPoolExecutor | None = None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            fix = "give cache.path a folder that can be written to"
            raise ConfigError("the file tier has no folder", got=f"{error.strerror}: {folder}", fix=fix) from error
        self._file = self._scratch.fileno()
        self._slab = torch.empty(0, width)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        with self._lock:
            slots = self._index.lookup(keys)
            hits = slots >= 0
            positions = where(hits)
            slots = at(slots, positions)
            self._clock += 1
            self._index.touch(slots, self._clock)
            self._read_slots(slots, positions, out)
            return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            slots = self._index.lookup(keys)
            new = where(slots < 0)
            if len(new):
                self._make_room(len(new))
                put(slots, new, self._index.add(at(keys, new)))
            self._move_rows(rows, self._slab, to=slots)
            self._clock += 1
            self._index.touch(slots, self._clock)

    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """See `RowStore`."""
        hits = self.read(keys, out)
        self.delete(keys[hits])
        return hits

    def delete(self, keys: Tensor) -> None:
        """See `RowStore`."""
        with self._lock:
            self._index.pop(keys)

    def least_recently_used(self, num: int) -> Tensor:
        """The keys of the `num` rows that were neither read nor written for longest."""
        with self._lock:
            used = self._index.is_used
            slots = self._lru_queue.pick(self._index.last_use, self._index.used, num, lambda slots: used[slots])
            return self._index.keys_at(slots)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowStore`."""
        for slots in torch.split(self._index.used(), chunk):
            yield self._index.keys_at(slots), self._slab[slots]

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """See `RowStore`."""
        with self._lock:
            keys = self._index.keys_at(self._index.used())
        return iter(torch.split(keys, chunk))

    def flush(self) -> None:
        """Hand what was written to the disk."""
        with self._lock:
            os.fsync(self._file)

    def close(self) -> None:
        """Give the room back."""
        with self._lock:
            if self._readers is not None:
                self._readers.shutdown()
            self._slab = torch.empty(0, self.width)
            self._scratch.close()

    def _make_room(self, num_new: int) -> None:
        short = num_new - self._index.num_free
        if short <= 0:
            return
        least = max(self._index.room // 4, MIN_GROWTH_BYTES // self._row_bytes)
        room = self._index.room + max(short, least)
        try:
            os.posix_fallocate(self._file, 0, room * self._row_bytes)
            # Rows lie anywhere, and what is beside them is not asked for.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise TrainingError(
                "the file tier has no room for its rows",
                got=f"{error.strerror} at {room * self._row_bytes / 2**20:.0f} MiB in {self._location}",
                fix="free space there, or give cache.path a larger disk; what is in memory is kept",
            ) from error
        self._index.grow(room)
        self._map()

    def _map(self) -> None:
        """Lay the file out in memory, as far as it goes now."""
        memory = mmap.mmap(self._file, self._index.room * self._row_bytes)
        memory.madvise(mmap.MADV_RANDOM)
        self._slab = torch.frombuffer(memory, dtype=torch.float32).view(-1, self.width)

    def _read_slots(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy the rows at `slots` to those places of `out`."""
        if not len(slots):
            return
        if self._is_cached(slots):
            self._move_rows(self._slab, out, at=slots, to=positions)
            return
        # Not by the mapping, in which an error of the disk would end the process without a word. In the order of the
        # file, for the sake of disks that have one.
        order = torch.from_numpy(slots.numpy().argsort())
        slots, positions = at(slots, order), at(positions, order)
        if self._readers is None:
            self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="file tier")
        parts = zip(torch.tensor_split(slots, NUM_READERS), torch.tensor_split(positions, NUM_READERS), strict=True)
        readers = [self._readers.submit(self._read_rows, self._file, out, *part) for part in parts]
        num_read = sum(reader.result() for reader in readers)
        if num_read < len(slots):
            raise TrainingError(
                "the disk does not give back rows of the file tier",
                got=f"{num_read} of {len(slots)} rows in {self._location}",
                fix="see what the system says of that disk, choose another one (cache.path), and resume",
            )

    def _is_cached(self, slots: Tensor) -> bool:
        """Whether the page cache seems to have all of these rows, judged by a sample of them."""
        sample = slots[:: max(1, len(slots) // NUM_SAMPLED)].tolist()
        buffer = bytearray(self._row_bytes)
        try:
            for slot in sample:
                os.preadv(self._file, [buffer], slot * self._row_bytes, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):
            # Not every file system can tell; there the mapping is as good as any other way.
            return True
        return True
