"""Write-behind: a thread writes rows to a slow store, and reads see the pending rows meanwhile."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.embedding_cache.store import RowStore

# Pending batches of rows; with more, `write` blocks.
MAX_PENDING = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingRows:
    """A batch of rows that the store below does not have yet."""

    keys: Tensor  # ascending
    rows: Tensor


class WriteBehindStore(RowStore):
    """A store whose `write` returns at once. `read` gives the rows written last, pending or not.

    When the store below fails, pending rows are kept, and every later call raises the same error.
    """

    def __init__(self, below: RowStore) -> None:
        self.width = below.width
        self._below = below
        self._changed = threading.Condition()
        self._pending: deque[PendingRows] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        self.drain()
        return len(self._below)

    def num_rows(self, name: str) -> dict[str, int]:
        self.drain()
        return self._below.num_rows(name)

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        # Pending rows come first: rows that are no longer pending by then are in the store below.
        hits = self._read_pending(keys, out)
        missing = (~hits).nonzero().squeeze(1)
        if len(missing):
            rows = out if len(missing) == len(keys) else torch.empty(len(missing), self.width)
            below = self._below.read(keys[missing], rows)
            if rows is not out:
                out[missing[below]] = rows[below]
            hits[missing[below]] = True
        return hits

    def write(self, keys: Tensor, rows: Tensor) -> None:
        if not len(keys):
            return
        ascending, order = keys.sort()
        batch = PendingRows(keys=ascending, rows=rows[order])
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) < MAX_PENDING or self._error is not None)
            self._check()
            self._pending.append(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_pending, name="write-behind", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def delete(self, keys: Tensor) -> None:
        self.drain()
        self._below.delete(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.drain()
        return self._below.scan(chunk)

    def keys(self, chunk: int) -> Iterator[Tensor]:
        self.drain()
        return self._below.keys(chunk)

    def drain(self) -> None:
        """Wait until nothing is pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._error is not None)
            self._check()

    def close(self) -> None:
        """See `RowStore`. Pending rows are written first, if the store below can."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._below.close()

    def _read_pending(self, keys: Tensor, out: Tensor) -> Tensor:
        hits = torch.zeros(len(keys), dtype=torch.bool)
        with self._changed:
            self._check()
            pending = list(self._pending)
        # A later batch overwrites the rows of an earlier one.
        for batch in pending:
            positions = torch.searchsorted(batch.keys, keys).clamp(max=len(batch.keys) - 1)
            is_here = batch.keys[positions] == keys
            out[is_here] = batch.rows[positions[is_here]]
            hits |= is_here
        return hits

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pending) or self._is_closed)
                if not self._pending:
                    return
                batch = self._pending[0]
            try:
                self._below.write(batch.keys, batch.rows)
            except BaseException as error:  # noqa: BLE001 (the next call raises it)
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
