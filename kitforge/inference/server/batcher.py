"""Dynamic batching: concurrent requests are processed together, up to a number of rows or a waiting time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, final

from kitforge.foundation.log import logger
from kitforge.inference.server.metrics import BatchMetrics

_log = logger(__name__)
Input = TypeVar("Input")
Output = TypeVar("Output")


@dataclass(eq=False, slots=True, kw_only=True)
class _Job(Generic[Input, Output]):
    input: Input
    num_rows: int
    answer: asyncio.Future[Output]
    submitted_at: float = field(default_factory=time.perf_counter)


@final
class DynamicBatcher(Generic[Input, Output]):
    """Calls `answer` on its own thread, between `start` and `stop`, with the inputs of a batch; it returns one output
    each.

    The first job of a batch waits at most `max_wait_ms` for others. A job with more than `max_rows` is a batch of its
    own: no input is split. Where a call raises, its inputs are processed one by one, so that an input fails alone.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Input]], Sequence[Output]],
        metrics: BatchMetrics,
        *,
        max_rows: int,
        max_wait_ms: float,
    ) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None
        self._answer = answer
        self._metrics = metrics
        self._max_rows = max_rows
        self._max_wait = max_wait_ms / 1000
        self._jobs: SimpleQueue[_Job[Input, Output] | None] = SimpleQueue()
        self._held: _Job[Input, Output] | None = None  # the next job, which did not fit into the previous batch
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Finish the submitted jobs and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    async def submit(self, input: Input, num_rows: int) -> Output:
        """The output for an input of `num_rows` rows. Raises what `answer` raises for this input."""
        answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            raise self.failure
        self._jobs.put(_Job(input=input, num_rows=num_rows, answer=answer))
        return await answer

    def _run(self) -> None:
        batch: list[_Job[Input, Output]] | None = []
        try:
            while (batch := self._next_batch()) is not None:
                if jobs := [job for job in batch if not job.answer.cancelled()]:
                    self._answer_batch(jobs)
        except Exception as error:  # noqa: BLE001 (any error must reach the waiting requests)
            _log.error("the batcher has stopped", exc_info=error)
            self.failure = error
            for job in batch or ():
                self._tell(job, error)
            while not self._jobs.empty():
                if (waiting := self._jobs.get()) is not None:
                    self._tell(waiting, error)
            if self.on_failure is not None:
                self.on_failure()

    def _next_batch(self) -> list[_Job[Input, Output]] | None:
        """The jobs of the next batch; None after `stop`."""
        first = self._held or self._jobs.get()
        self._held = None
        if first is None:
            return None
        batch, num_rows, end = [first], first.num_rows, time.perf_counter() + self._max_wait
        while num_rows < self._max_rows:
            wait = end - time.perf_counter()
            try:
                job = self._jobs.get(timeout=wait) if wait > 0 else self._jobs.get_nowait()
            except Empty:
                break
            if job is None:
                # `stop` was called; the thread ends after this batch.
                self._jobs.put(None)
                break
            if num_rows + job.num_rows > self._max_rows:
                self._held = job
                break
            batch.append(job)
            num_rows += job.num_rows
        return batch

    def _answer_batch(self, jobs: Sequence[_Job[Input, Output]]) -> None:
        now = time.perf_counter()
        for job in jobs:
            self._metrics.queue_time.observe(now - job.submitted_at)
        self._metrics.batch_rows.observe(sum(job.num_rows for job in jobs))
        try:
            outputs = self._answer([job.input for job in jobs])
        except Exception as error:  # noqa: BLE001 (an error fails its own input alone)
            if len(jobs) == 1:
                self._tell(jobs[0], error)
                return
            for job in jobs:
                self._answer_batch([job])
            return
        for job, output in zip(jobs, outputs, strict=True):
            self._metrics.rows.inc(job.num_rows)
            self._tell(job, output)

    def _tell(self, job: _Job[Input, Output], output: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(set_result, job.answer, output)


def set_result(answer: asyncio.Future[Any], output: Any) -> None:
    """Give a future its result or exception, unless it has been cancelled."""
    if answer.done():
        return
    if isinstance(output, Exception):
        answer.set_exception(output)
    else:
        answer.set_result(output)
