"""Who wants to see rows before their values change."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

# Places [k] among the keys, to copies of their rows [k, width].
RowsAt = Callable[[Tensor], Tensor]
WriteObserver = Callable[[Tensor, RowsAt], None]


@final
class WriteObservers:
    """A list that costs nothing while it is empty."""

    def __init__(self) -> None:
        self._observers: list[WriteObserver] = []

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: WriteObserver) -> None:
        """Tell it of every change from now on."""
        self._observers = [*self._observers, observer]

    def remove(self, observer: WriteObserver) -> None:
        """Tell it no more. It may have been removed before."""
        self._observers = [each for each in self._observers if each != observer]

    def before_change(self, keys: Tensor, rows_at: RowsAt) -> None:
        """The rows of these keys [n] are about to change."""
        for watcher in self._observers:
            watcher(keys, rows_at)
