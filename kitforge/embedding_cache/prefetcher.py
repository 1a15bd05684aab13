"""Prefetch: a thread that plans the lookups of the next batches while the current one trains.

It moves rows between tiers only; their values are read when the batch is computed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Generic, TypeVar

from torch import Tensor

from kitforge.embedding_cache.cache import RowCache
from kitforge.foundation.config import check

Batch = TypeVar("Batch")


class EmbeddingPrefetcher(Generic[Batch]):
    """The batches in order, each when its rows are in the device tier; `depth` of them are planned ahead.

    Errors of the batches and of planning are raised in place of the batch. Leaving the loop ends the thread.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        depth: int,
        caches: Sequence[RowCache],
        lookups: Callable[[Batch], Iterable[tuple[RowCache, Tensor]]],
    ) -> None:
        """`lookups` gives the ids that each of the `caches` looks up in a batch, in the order of the lookups."""
        check(depth >= 0, "cache.prefetch_batches", depth, "a whole number of at least 0")
        self._batches, self._depth, self._caches, self._lookups = batches, depth, caches, lookups
        # Batches beyond the one being planned that eviction policies read.
        self._window = max((cache.manager.policy.window for cache in caches), default=0)
        # Whether planning is a collective, so that all ranks must plan the same number of batches.
        self._is_collective = any(cache.is_collective for cache in caches)
        on_cpu = any(cache.device.device.type == "cpu" for cache in caches)
        self._is_parallel = len(caches) > 1 and not on_cpu and not self._is_collective
        self._ready: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_finished = False
        self._error: BaseException | None = None
        self._awaited = ExitStack()  # entered while the trainer waits, closed by the thread
        self._thread = threading.Thread(target=self._run, name="embedding prefetch", daemon=True)

    def __iter__(self) -> Iterator[Batch]:
        if not self._depth:
            yield from self._batches
            return
        self._thread.start()
        try:
            while self._wait():
                with self._changed:
                    batch = self._ready.popleft()
                    self._changed.notify_all()
                yield batch
            if self._error is not None:
                raise self._error
        finally:
            self._close()

    def _wait(self) -> bool:
        """Wait for a batch; False when there are no more."""
        with self._changed:
            if not self._ready and not self._is_finished:
                # The trainer waits, so planning must not wait for the trainer until this batch is ready.
                for cache in self._caches:
                    self._awaited.enter_context(cache.pins.trainer_waiting())
                self._changed.wait_for(lambda: bool(self._ready) or self._is_finished)
            return bool(self._ready)

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with ExitStack() as waiting:
            for cache in self._caches:
                waiting.enter_context(cache.pins.trainer_waiting())
            self._thread.join()
        self._ready.clear()
        # The lookups that were planned or announced and not made.
        for cache in self._caches:
            cache.prefetched.cancel_all()
            cache.manager.policy.future.clear()

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(len(self._caches) or 1, thread_name_prefix="table plan") as pool:
                for batch in self._with_lookahead():
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
                        may_plan = len(self._ready) < self._depth if self._is_collective else not self._is_closed
                    # Where planning is a collective, the batches that were allowed when the loop was left are still
                    # planned: all ranks left after the same batch, so all plan the same number.
                    if not may_plan:
                        break
                    self._plan(batch, pool)
                    with self._changed:
                        self._ready.append(batch)
                        self._awaited.close()
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (the trainer raises it)
            self._error = error
        with self._changed:
            self._is_finished = True
            self._awaited.close()
            self._changed.notify_all()

    def _plan(self, batch: Batch, pool: Executor) -> None:
        """Plan the lookups of a batch: those of a table in their order, and those of several tables at once if training
        leaves the CPU to them."""
        by_cache: dict[RowCache, list[Tensor]] = {}
        for cache, ids in self._lookups(batch):
            if self._is_parallel:
                by_cache.setdefault(cache, []).append(ids)
            else:
                cache.prefetch(ids)

        def plan_all(cache: RowCache, given: list[Tensor]) -> None:
            for ids in given:
                cache.prefetch(ids)

        for each in [pool.submit(plan_all, *lookups) for lookups in by_cache.items()]:
            each.result()

    def _with_lookahead(self) -> Iterator[Batch]:
        """The batches, each after the `window` next ones were announced."""
        ahead: deque[Batch] = deque()
        for batch in self._batches:
            for cache, ids in self._lookups(batch) if self._window else ():
                cache.on_future_access(ids)
            ahead.append(batch)
            if len(ahead) > self._window:
                yield ahead.popleft()
        yield from ahead
