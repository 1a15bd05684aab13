"""A thread pool for the steps of environments, in which a step that hangs takes no worker from the others."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, final

import torch

_LOOP_LOCK = threading.Lock()


@final
@dataclass(slots=True, eq=False)
class Job:
    """One call, and in the end its result, or its error, or neither where it took too long."""

    call: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    has_timed_out: bool = False
    started: float | None = None  # by the monotonic clock
    awaited: Future[Any] | None = field(default=None, repr=False)  # of an async call


@final
class StepPool:
    """Runs calls, plain or async, in up to `max_workers` daemon threads; `timeout` seconds each, None: any time.

    Python cannot stop a thread: that of a call which takes too long is left alone, and another takes its place. An
    async call is cancelled. All async calls share one event loop, so that they may share connections.
    """

    def __init__(self, max_workers: int, timeout: float | None) -> None:
        self._max_workers = max_workers
        self._timeout = timeout
        self._pending: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()

    def submit(self, call: Callable[[], Any]) -> Job:
        """Begin a call as soon as a thread is free."""
        job = Job(call)
        with self._changed:
            self._pending.append(job)
            self._start_thread()
        return job

    def check(self) -> None:
        """Give up the calls that take too long."""
        with self._changed:
            self._drop_overdue()

    def wait(self, jobs: Iterable[Job]) -> None:
        """Return once all of these calls are done or have been given up."""
        with self._changed:
            for job in jobs:
                while not job.is_done:
                    self._drop_overdue()
                    if not job.is_done:
                        self._changed.wait(self._time_left())

    def _start_thread(self) -> None:
        """One more thread, if there is something to do and room for it."""
        if self._pending and len(self._running) < self._max_workers:
            job = self._take()
            threading.Thread(target=self._work, args=(job,), name="environment", daemon=True).start()

    def _take(self) -> Job:
        job = self._pending.popleft()
        job.started = time.monotonic()
        self._running.add(job)
        return job

    def _work(self, job: Job) -> None:
        """Run one call after the other until there are none, or until the thread has been given up."""
        while True:
            result, error = self._run(job)
            with self._changed:
                if job.has_timed_out:
                    return
                job.result, job.error, job.is_done = result, error, True
                self._running.remove(job)
                self._changed.notify_all()
                if not self._pending:
                    return
                job = self._take()

    def _run(self, job: Job) -> tuple[Any, BaseException | None]:
        try:
            with torch.no_grad():
                result = job.call()
            if inspect.isawaitable(result):
                with _LOOP_LOCK:
                    loop = _event_loop()
                job.awaited = asyncio.run_coroutine_threadsafe(_awaited(result), loop)
                result = job.awaited.result()
        except BaseException as error:  # noqa: BLE001 (an environment is foreign code, and may even call sys.exit)
            return None, error
        return result, None

    def _drop_overdue(self) -> None:
        if self._timeout is None:
            return
        overdue = [job for job in self._running if self._age(job) >= self._timeout]
        for job in overdue:
            job.has_timed_out = job.is_done = True
            self._running.remove(job)
            if job.awaited is not None:
                job.awaited.cancel()
            self._start_thread()

    def _time_left(self) -> float | None:
        """Seconds until the next call takes too long."""
        if self._timeout is None or not self._running:
            return None
        return max(self._timeout - max(map(self._age, self._running)), 0.0)

    def _age(self, job: Job) -> float:
        assert job.started is not None
        return time.monotonic() - job.started


async def _awaited(value: Any) -> Any:
    return await value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all async steps of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environment event loop", daemon=True).start()
    return loop
