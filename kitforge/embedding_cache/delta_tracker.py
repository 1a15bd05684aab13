"""Which rows changed and which went since the last snapshot, so that an incremental checkpoint reads no others."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from kitforge.foundation.errors import CheckpointError

# Keys, with repetitions, before they are made distinct for the first time.
FIRST_KEYS = 2**16


@final
class DeltaTracker:
    """Keeps the keys of one interval: from the snapshot of version `since` to the next. It costs nothing before the
    first snapshot that another may build on, and never more than the distinct keys of the interval."""

    def __init__(self) -> None:
        self.restart(None)

    def restart(self, since: int | None) -> None:
        """Begin an interval at that version; None: nobody will ask for changes."""
        self.since = since
        self._changed, self._removed = _DistinctKeys(), _DistinctKeys()

    @property
    def is_on(self) -> bool:
        """Whether changes have to be told."""
        return self.since is not None

    def mark_changed(self, keys: Tensor) -> None:
        """The rows of these distinct keys are about to change."""
        if self.is_on:
            self._changed.add(keys)

    def mark_removed(self, keys: Tensor) -> None:
        """The rows of these distinct keys are gone for good."""
        if self.is_on:
            self._removed.add(keys)

    def changes(self, since: int) -> tuple[Tensor, Tensor]:
        """The distinct keys that changed, some of which may be gone, and those that went, some of which may be back.

        Raises CheckpointError unless the interval began with version `since`.
        """
        if self.since != since:
            raise CheckpointError(
                f"what changed since version {since} of a table is not known",
                got="no snapshot to build on" if self.since is None else f"changes since version {self.since}",
                fix="take a snapshot of all rows first",
            )
        return self._changed.distinct(), self._removed.distinct()


@final
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
