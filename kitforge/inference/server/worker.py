"""The thread that runs the engine. Prompts come in and deltas go out through queues. Independent of HTTP."""

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from queue import Empty

from kitforge.data.text.continuation import ReplyMarks
from kitforge.foundation.log import logger
from kitforge.inference.constraint import Constraint
from kitforge.inference.server.batcher import LoopThread, set_result
from kitforge.inference.server.metrics import Metrics
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine

_log = logger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class PromptJob:
    """One prompt in the engine, and the queue for its deltas: each at once, or with `delivers_at_end` all at its end.
    `first_choice` is the index of its first sample among the choices of the request."""

    prompt: list[int]
    options: InferenceOptions
    num_samples: int
    key: str | int
    constraint: Constraint | None = None
    marks: ReplyMarks | None = None
    first_choice: int
    delivers_at_end: bool = False
    queue: asyncio.Queue[tuple[int, TextDelta | Exception]]
    request: int | None = field(default=None, init=False)  # its number in the engine, once submitted
    num_open: int = field(default=0, init=False)  # unfinished samples
    num_cached: int = field(default=0, init=False)  # tokens of the prompt that were in the prefix cache
    # By `time.perf_counter`: creation, admission, the first delta, and the latest delta of each sample.
    submitted_at: float = field(default_factory=time.perf_counter, init=False)
    started_at: float | None = field(default=None, init=False)
    first_at: float | None = field(default=None, init=False)
    last_at: dict[int, float] = field(default_factory=dict, init=False)
    pending: list[TextDelta] = field(default_factory=list, init=False)  # deltas not yet delivered


class Worker(LoopThread):
    """Steps the engine between `start` and `stop`, which drops unfinished prompts. All other methods are called from
    the event loop of `start`."""

    def __init__(self, texts: TextEngine, metrics: Metrics) -> None:
        super().__init__("engine")
        self._text_engine = texts
        self._metrics = metrics
        self._jobs: dict[int, PromptJob] = {}

    def submit(self, job: PromptJob) -> None:
        """Submit a prompt; its queue gets (choice, delta) pairs, or an error."""
        self._inbox.put(partial(self._admit, job))

    def cancel(self, job: PromptJob) -> None:
        """Cancel a prompt."""
        self._inbox.put(partial(self._cancel, job))

    async def stats(self) -> dict[str, int]:
        """The statistics of the engine, read between two steps."""
        future: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._call_soon(set_result, future, self._text_engine.engine.stats()))
        return await future

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._run_commands()
                if goes_on and self.failure is None and self._text_engine.has_work:
                    self._step()
            except Exception as error:  # noqa: BLE001 (any error must reach the waiting requests)
                self._fail(error)

    def _step(self) -> None:
        since = time.perf_counter()
        deltas = self._text_engine.step()
        for request, num_cached in self._text_engine.engine.admitted.items():
            job = self._jobs.get(request)
            if job is not None and job.started_at is None:
                job.started_at, job.num_cached = since, num_cached
                self._metrics.queue_time.observe(since - job.submitted_at)
        self._dispatch(deltas)

    def _run_commands(self) -> bool:
        """Run the queued commands, waiting for one where the engine has no work; False: stop."""
        may_wait = self.failure is not None or not self._text_engine.has_work
        while True:
            try:
                command = self._inbox.get(block=may_wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            may_wait = False

    def _admit(self, job: PromptJob) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            request = self._text_engine.submit(
                job.prompt,
                job.options,
                num_samples=job.num_samples,
                key=job.key,
                constraint=job.constraint,
                marks=job.marks,
            )
        except Exception as error:  # noqa: BLE001 (an invalid prompt fails its own request alone)
            self._call_soon(job.queue.put_nowait, (job.first_choice, error))
            return
        job.request, job.num_open = request, job.num_samples
        self._jobs[request] = job

    def _cancel(self, job: PromptJob) -> None:
        if job.request is not None and self._jobs.pop(job.request, None) is not None:
            self._text_engine.cancel(job.request)

    def _dispatch(self, deltas: list[TextDelta]) -> None:
        batch: list[tuple[PromptJob, list[TextDelta]]] = []
        now = time.perf_counter()
        for delta in deltas:
            job = self._jobs.get(delta.request)
            if job is None:
                continue
            job.first_at = job.first_at or now
            last = job.last_at.get(delta.sample)
            job.last_at[delta.sample] = now
            if last is not None:
                for _ in delta.tokens:
                    self._metrics.inter_token.observe((now - last) / len(delta.tokens))
            job.pending.append(delta)
            job.num_open -= delta.finish_reason is not None
            if job.num_open == 0:
                del self._jobs[delta.request]
            # Waking the event loop for a token costs as much as a small request.
            if not job.delivers_at_end or job.num_open == 0 or delta.finish_reason in ("diverged", "failed"):
                batch.append((job, job.pending))
                job.pending = []
        if batch:
            # Once for all deltas of a step, since waking the event loop is expensive.
            self._call_soon(_deliver, batch)

    def _fail(self, error: Exception) -> None:
        """The engine has failed: fail all current and later requests."""
        _log.error("the engine has stopped", exc_info=error)
        is_first, self.failure = self.failure is None, self.failure or error
        if is_first and self.on_failure is not None:
            self.on_failure()
        for job in self._jobs.values():
            self._call_soon(job.queue.put_nowait, (job.first_choice, error))
        self._jobs.clear()


def _deliver(batch: list[tuple[PromptJob, list[TextDelta]]]) -> None:
    for job, deltas in batch:
        for delta in deltas:
            job.queue.put_nowait((job.first_choice + delta.sample, delta))
