"""Tracks which rows change: for the copy-on-write of snapshots, and for incremental checkpoints."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kitforge.foundation.errors import CheckpointError

# Keys, with repetitions, before they are made distinct for the first time.
FIRST_KEYS = 2**16
# Positions [k] among the keys, to copies of their rows [k, width].
RowsAt = Callable[[Tensor], Tensor]


class ChangeTracker:
    """Calls `observers` before rows change, and keeps the keys changed and removed since the last snapshot.

    It costs nothing while there is no observer and no snapshot that another may build on, and never keeps more than a
    few times the distinct keys of the interval.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[Tensor, RowsAt], None]] = []
        self.restart(None)

    def restart(self, since: int | None) -> None:
        """Begin an interval at version `since`; None: no snapshot will ask for changes."""
        self.since = since
        self._changed, self._removed = _DistinctKeys(), _DistinctKeys()

    def before_change(self, keys: Tensor, rows_at: RowsAt) -> None:
        """The rows of these distinct keys [n] are about to change."""
        if self.since is not None:
            self._changed.add(keys)
        self.notify(keys, rows_at)

    def notify(self, keys: Tensor, rows_at: RowsAt) -> None:
        """Call the observers alone."""
        for observer in self.observers:
            observer(keys, rows_at)

    def mark_removed(self, keys: Tensor) -> None:
        """The rows of these distinct keys were deleted."""
        if self.since is not None:
            self._removed.add(keys)

    def changes(self, since: int) -> tuple[Tensor, Tensor]:
        """The distinct keys that changed, some of which may be deleted now, and those deleted, some of which may be
        back. Raises CheckpointError unless the interval began with version `since`."""
        if self.since != since:
            raise CheckpointError(
                f"the changes since version {since} of a table are not known",
                got="no snapshot to build on" if self.since is None else f"changes since version {self.since}",
                fix="take a snapshot of all rows first",
            )
        return self._changed.distinct(), self._removed.distinct()


class _DistinctKeys:
    """Keys that come many times, each kept once or twice."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._num, self._limit = 0, FIRST_KEYS

    def add(self, keys: Tensor) -> None:
        self._parts.append(keys)
        self._num += len(keys)
        if self._num > self._limit:
            self._limit = max(FIRST_KEYS, 2 * len(self.distinct()))

    def distinct(self) -> Tensor:
        """All of them once, ascending."""
        keys = torch.cat([*self._parts, torch.empty(0, dtype=torch.int64)])
        self._parts = [torch.from_numpy(np.unique(keys.numpy()))]
        self._num = len(self._parts[0])
        return self._parts[0]
