"""Prefetching of any iterator in a background thread."""

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar

from kitforge.foundation.config import check

T = TypeVar("T")

# Seconds that `close` waits for the item in progress; the thread ends after it in any case.
_JOIN_TIMEOUT_SECONDS = 5.0


class _BoundedQueue(Generic[T]):
    """The queue of both threads. It has no reference to the prefetcher, so that an unused one is garbage collected."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[T] = deque()
        self.changed = threading.Condition()
        self.is_closed = False
        self.is_finished = False
        self.error: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for a free slot; False once the consumer has closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or len(self.items) < self.depth)
            if not self.is_closed:
                self.items.append(item)
                self.changed.notify_all()
            return not self.is_closed

    def take(self) -> T:
        """Wait for an item; after the last one raise the error of the producer, if any, then StopIteration."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closed or self.is_finished or bool(self.items))
            if self.items and not self.is_closed:
                self.changed.notify_all()
                return self.items.popleft()
            error, self.error = self.error, None
        if error is not None and not self.is_closed:
            raise error
        raise StopIteration

    def finish(self, error: BaseException | None) -> None:
        """The producer has ended."""
        with self.changed:
            self.is_finished, self.error = True, error
            self.changed.notify_all()

    def close(self, thread: threading.Thread) -> None:
        """Close the consumer side, wake the producer and wait for its end."""
        with self.changed:
            self.is_closed = True
            self.items.clear()
            self.changed.notify_all()
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT_SECONDS)


class BackgroundPrefetcher(Generic[T]):
    """Prefetches up to `depth` items of an iterator. Order and exceptions are those of the iterator.

    Closing it, leaving its context or dropping it ends the thread, also while the queue is full.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        check(depth >= 1, "data.prefetch", depth, "at least 1")
        self._shelf: _BoundedQueue[T] = _BoundedQueue(depth)
        # A daemon thread: at exit the interpreter would wait for other threads before they could be stopped.
        self._thread = threading.Thread(target=_produce, args=(items, self._shelf), name="prefetch", daemon=True)
        self._close = weakref.finalize(self, self._shelf.close, self._thread)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._shelf.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop prefetched items. May be called more than once."""
        self._close()


def _produce(items: Iterable[T], shelf: _BoundedQueue[T]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not shelf.put(item):
                break
    except BaseException as caught:  # noqa: BLE001 (the consumer raises it, whatever it is)
        error = caught
    shelf.finish(error)
