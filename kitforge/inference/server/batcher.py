"""Dynamic batching: concurrent requests are processed together, up to a number of rows or a waiting time."""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

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


class LoopThread(ABC):
    """A thread between `start` and `stop`, whose results go to the event loop of `start`."""

    def __init__(self, name: str) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None  # called once, on the thread
        self._inbox: SimpleQueue[Any] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._inbox.put(None)
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """The work of the thread, until `stop`."""

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


class DynamicBatcher(LoopThread, Generic[Input, Output]):
    """Calls `answer` on its own thread, between `start` and `stop`, with the inputs of a batch; it returns one output
    each.

    The first job of a batch waits at most `max_wait_ms` for others. A job with more than `max_rows` is a batch of its
    own: no input is split. Where a call raises, its inputs are processed one by one, so that an input fails alone.
    `stop` finishes the submitted jobs.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Input]], Sequence[Output]],
        metrics: BatchMetrics,
        *,
        max_rows: int,
        max_wait_ms: float,
    ) -> None:
        super().__init__("batcher")
        self._answer = answer
        self._metrics = metrics
        self._max_rows = max_rows
        self._max_wait = max_wait_ms / 1000
        self._held: _Job[Input, Output] | None = None  # the next job, which did not fit into the previous batch

    async def submit(self, input: Input, num_rows: int) -> Output:
        """The output for an input of `num_rows` rows. Raises what `answer` raises for this input."""
        answer: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            raise self.failure
        self._inbox.put(_Job(input=input, num_rows=num_rows, answer=answer))
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
                self._call_soon(set_result, job.answer, error)
            while not self._inbox.empty():
                if (waiting := self._inbox.get()) is not None:
                    self._call_soon(set_result, waiting.answer, error)
            if self.on_failure is not None:
                self.on_failure()

    def _next_batch(self) -> list[_Job[Input, Output]] | None:
        """The jobs of the next batch; None after `stop`."""
        first = self._held or self._inbox.get()
        self._held = None
        if first is None:
            return None
        batch, num_rows, end = [first], first.num_rows, time.perf_counter() + self._max_wait
        while num_rows < self._max_rows:
            wait = end - time.perf_counter()
            try:
                job = self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
            except Empty:
                break
            if job is None:
                # `stop` was called; the thread ends after this batch.
                self._inbox.put(None)
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
                self._call_soon(set_result, jobs[0].answer, error)
                return
            for job in jobs:
                self._answer_batch([job])
            return
        for job, output in zip(jobs, outputs, strict=True):
            self._metrics.rows.inc(job.num_rows)
            self._call_soon(set_result, job.answer, output)


def set_result(answer: asyncio.Future[Any], output: Any) -> None:
    """Give a future its result or exception, unless it has been cancelled."""
    if answer.done():
        return
    if isinstance(output, Exception):
        answer.set_exception(output)
    else:
        answer.set_result(output)
