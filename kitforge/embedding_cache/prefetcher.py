"""A thread that goes through the batches ahead of the training and has their rows moved.

It decides only where rows live; what they hold is read when the batch is computed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar, final

from kitforge.foundation.config import check

Batch = TypeVar("Batch")


class PrefetchClient(ABC, Generic[Batch]):
    """What there is to do for a batch before it is trained on."""

    # How many batches beyond the one that is planned `expect` should have been told of.
    window: int = 0
    # Whether other ranks do the same, so that all must plan as many batches as each other.
    is_collective: bool = False

    @abstractmethod
    def on_future_access(self, batch: Batch) -> None:
        """This batch will be planned later; called only where there is a window."""

    @abstractmethod
    def plan(self, batch: Batch) -> None:
        """Have its rows moved."""

    @abstractmethod
    def trainer_waiting(self) -> AbstractContextManager[Any]:
        """While the block lasts, somebody waits for `plan`, which must not wait for him."""

    @abstractmethod
    def cancel(self) -> None:
        """Batches that were planned and not trained on will not be."""


@final
class EmbeddingPrefetcher(Generic[Batch]):
    """Batches in their order, each when its rows are in place; `depth` of them are planned ahead.

    Errors of the batches and of planning are raised where the batch would have come. `close` ends the thread.
    """

    def __init__(self, batches: Iterable[Batch], depth: int, client: PrefetchClient[Batch]) -> None:
        check(depth >= 0, "cache.prefetch_batches", depth, "a whole number of at least 0")
        self._batches, self._depth, self._client = batches, depth, client
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_finished = False
        self._error: BaseException | None = None
        self._awaited = ExitStack()  # left by the thread that has what is awaited
        self._thread = threading.Thread(target=self._run, name="embedding prefetch", daemon=True)

    def __iter__(self) -> Iterator[Batch]:
        if not self._depth:
            yield from self._batches
            return
        self._thread.start()
        try:
            while self._wait():
                yield self._take()
            if self._error is not None:
                raise self._error
        finally:
            self._close()

    def _wait(self) -> bool:
        """Wait for a batch; False when there are no more."""
        with self._changed:
            if not self._ready and not self._is_finished:
                # Nobody trains, so planning must not wait for training to go on, until this batch is there.
                self._awaited.enter_context(self._client.trainer_waiting())
                self._changed.wait_for(lambda: bool(self._ready) or self._is_finished)
            return bool(self._ready)

    def _take(self) -> Batch:
        with self._changed:
            self._changed.notify_all()
            return self._ready.popleft()

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self._client.trainer_waiting():
            self._thread.join()
        self._ready.clear()
        self._client.cancel()

    def _run(self) -> None:
        try:
            for batch in self._with_lookahead():
                if not self._may_go_on():
                    break
                self._client.plan(batch)
                with self._changed:
                    self._ready.append(batch)
                    self._awaited.close()
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (the consumer raises it, whatever it is)
            self._error = error
        with self._changed:
            self._is_finished = True
            self._awaited.close()
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        """Wait until fewer than `depth` batches are ready; False when nobody wants more.

        Where ranks plan together, those that were allowed at the close are still planned: all ranks closed after the
        same batch, so all plan the same number.
        """
        with self._changed:
            if self._client.is_collective:
                self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
                return len(self._ready) < self._depth
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
            return not self._is_closed

    def _with_lookahead(self) -> Iterator[Batch]:
        """The batches, each when `window` more have been announced."""
        if not self._client.window:
            yield from self._batches
            return
        ahead: deque[Batch] = deque()
        for batch in self._batches:
            self._client.on_future_access(batch)
            ahead.append(batch)
            if len(ahead) > self._client.window:
                yield ahead.popleft()
        yield from ahead
