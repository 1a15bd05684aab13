"""The file tier: rows in slots of one file, their keys in memory.

The file is temporary and has no name: it ends with its process, and no other process can truncate it. Checkpoints keep
rows beyond that.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels
from kitforge.core.kernels.tables.indexing import at, put, where
from kitforge.embedding_cache.keys.slot_map import SlotMap
from kitforge.embedding_cache.tiers.slab_store import SlabStore
from kitforge.foundation.errors import ConfigError, TrainingError

# Concurrent reads of rows that are not in the page cache: a disk serves many at once far faster than one by one.
NUM_READERS = 32
# Rows sampled to test whether they are in the page cache.
NUM_SAMPLED = 24
# The file grows by a quarter of its size, and by at least this many bytes.
MIN_GROWTH_BYTES = 2**20


class FileStore(SlabStore):
    """Rows of the table `name` in a file in `folder`. Disk space is allocated before it is written.

    Raises ConfigError for a folder that cannot be used, and TrainingError where the disk is full or does not return
    the rows that were written.
    """

    def __init__(
        self, folder: Path | str, name: str, width: int, kernels: TableKernels, capacity: int | None = None
    ) -> None:
        super().__init__(width, capacity, SlotMap(kernels.hash_map, 0))
        self._location = f"{folder}, for the rows of {name}"
        self._row_bytes = 4 * width
        self._copy_rows, self._pread_rows = kernels.copy_rows, kernels.pread_rows
        self._readers: ThreadPoolExecutor | None = None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by `close`)
        except OSError as error:
            fix = "give cache.path a folder that can be written to"
            raise ConfigError("the file tier has no folder", got=f"{error.strerror}: {folder}", fix=fix) from error
        self._file = self._scratch.fileno()

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        with self._lock:
            slots = self._index.lookup(keys)
            hits = slots >= 0
            positions = where(hits)
            slots = at(slots, positions)
            self._touch(slots)
            self._read_slots(slots, positions, out)
            return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        with self._lock:
            slots = self._index.lookup(keys)
            new = where(slots < 0)
            if len(new):
                self._make_room(len(new))
                put(slots, new, self._index.add(at(keys, new)))
            self._copy_rows(rows, self._slab, to=slots)
            self._touch(slots)

    def put(self, keys: Tensor, rows: Tensor, dirty: Tensor) -> None:
        """See `SlabStore`. The store below is taken to lack every row."""
        self.write(keys, rows)

    def spill(self, num: int, write_below: Callable[[Tensor, Tensor], None]) -> None:
        """See `SlabStore`. Reads go on while the store below writes, which may be slow."""
        with self._lock:
            used = self._index.is_used
            keys = self._index.keys_at(self._lru.victims(num, lambda slots: used[slots]))
        rows = torch.empty(len(keys), self.width)
        self.read(keys, rows)
        write_below(keys, rows)
        self.delete(keys)

    def close(self) -> None:
        """See `RowStore`. The disk space is freed."""
        with self._lock:
            if self._readers is not None:
                self._readers.shutdown()
            self._slab = torch.empty(0, self.width)
            self._scratch.close()

    def _make_room(self, num_new: int) -> None:
        short = num_new - self._index.num_free
        if short <= 0:
            return
        room = self._index.room + max(short, self._index.room // 4, MIN_GROWTH_BYTES // self._row_bytes)
        try:
            os.posix_fallocate(self._file, 0, room * self._row_bytes)
            # Access is random: the system need not read ahead.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise TrainingError(
                "the file tier has no room for its rows",
                got=f"{error.strerror} at {room * self._row_bytes / 2**20:.0f} MiB in {self._location}",
                fix="free space there, or give cache.path a larger disk; the rows in memory are kept",
            ) from error
        self._index.grow(room)
        memory = mmap.mmap(self._file, room * self._row_bytes)
        memory.madvise(mmap.MADV_RANDOM)
        self._slab = torch.frombuffer(memory, dtype=torch.float32).view(-1, self.width)

    def _read_slots(self, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy the rows at `slots` to out[positions]."""
        if not len(slots):
            return
        if self._is_cached(slots):
            self._copy_rows(self._slab, out, at=slots, to=positions)
            return
        # Not through the mapping, where a disk error would kill the process with SIGBUS. In file order, for spinning
        # disks.
        order = torch.from_numpy(slots.numpy().argsort())
        slots, positions = at(slots, order), at(positions, order)
        if self._readers is None:
            self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="file tier")
        parts = zip(torch.tensor_split(slots, NUM_READERS), torch.tensor_split(positions, NUM_READERS), strict=True)
        readers = [self._readers.submit(self._pread_rows, self._file, out, *part) for part in parts]
        num_read = sum(reader.result() for reader in readers)
        if num_read < len(slots):
            raise TrainingError(
                "the disk does not return rows of the file tier",
                got=f"{num_read} of {len(slots)} rows in {self._location}",
                fix="check the system log for that disk, choose another one (cache.path), and resume",
            )

    def _is_cached(self, slots: Tensor) -> bool:
        """Whether a sample of these rows is in the page cache."""
        sample = slots[:: max(1, len(slots) // NUM_SAMPLED)].tolist()
        buffer = bytearray(self._row_bytes)
        try:
            for slot in sample:
                os.preadv(self._file, [buffer], slot * self._row_bytes, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):
            # Not every file system supports RWF_NOWAIT; there the mapping is as good as pread.
            pass
        return True
