"""Who wants to see rows before their values change."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

# Places [k] among the keys, to copies of their rows [k, width].
RowsAt = Callable[[Tensor], Tensor]
Watcher = Callable[[Tensor, RowsAt], None]


@final
class Watchers:
    """A list that costs nothing while it is empty."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """Tell it of every change from now on."""
        self._watchers = [*self._watchers, watcher]

    def remove(self, watcher: Watcher) -> None:
        """Tell it no more. It may have been removed before."""
        self._watchers = [each for each in self._watchers if each != watcher]

    def before_change(self, keys: Tensor, rows_at: RowsAt) -> None:
        """The rows of these keys [n] are about to change."""
        for watcher in self._watchers:
            watcher(keys, rows_at)
