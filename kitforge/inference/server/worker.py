"""The one thread that runs an engine. Prompts go in and pieces come out through queues. Knows no HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, final

from kitforge.foundation.log import logger
from kitforge.inference.server.metrics import Metrics
from kitforge.inference.text import InferenceOptions, Piece, TextEngine

_log = logger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """One prompt on its way through the engine, and where its pieces go: each as it comes, or with `is_whole` all at
    its end. `first` is the number of its first sample among all that the queue's owner waits for."""

    prompt: list[int]
    options: InferenceOptions
    num_samples: int
    key: str | int
    num_alternatives: int = 0
    first: int
    is_whole: bool = False
    queue: asyncio.Queue[tuple[int, Piece | Exception]]
    request: int | None = field(default=None, init=False)  # its number in the engine, once it has arrived there
    num_open: int = field(default=0, init=False)  # samples that have not ended
    # By `time.perf_counter`: when it was made, when its prompt began to be read, and when its first piece and the last
    # piece of each sample came.
    submitted_at: float = field(default_factory=time.perf_counter, init=False)
    started_at: float | None = field(default=None, init=False)
    first_at: float | None = field(default=None, init=False)
    last_at: dict[int, float] = field(default_factory=dict, init=False)
    held: list[Piece] = field(default_factory=list, init=False)  # pieces that nobody has been told of


@final
class Worker:
    """Runs `texts` between `start` and `stop`. Everything else is called from the event loop it was started with."""

    def __init__(self, texts: TextEngine, metrics: Metrics) -> None:
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None  # called once, on the worker's thread
        self._texts = texts
        self._metrics = metrics
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way; what has not been answered never is."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, ticket: Ticket) -> None:
        """Have a prompt answered: pieces with the numbers of their samples come to its queue, or an error."""
        self._inbox.put(partial(self._admit, ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this prompt any more."""
        self._inbox.put(partial(self._drop, ticket))

    async def stats(self) -> dict[str, int]:
        """The engine's counts, between two steps."""
        found: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._inbox.put(lambda: self._tell(_settle, found, self._texts.engine.stats()))
        return await found

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._obey()
                if goes_on and self.failure is None and self._texts.has_work:
                    self._step()
            except Exception as error:  # noqa: BLE001 (whatever it is, those who wait must hear of it)
                self._fail(error)

    def _step(self) -> None:
        since = time.perf_counter()
        pieces = self._texts.step()
        for request in self._texts.engine.admitted:
            ticket = self._tickets.get(request)
            if ticket is not None and ticket.started_at is None:
                ticket.started_at = since
                self._metrics.queue_time.observe(since - ticket.submitted_at)
        self._hand_out(pieces)

    def _obey(self) -> bool:
        """Carry out what has been asked for meanwhile, waiting where there is nothing else to do; False: stop."""
        may_wait = self.failure is not None or not self._texts.has_work
        while True:
            try:
                command = self._inbox.get(block=may_wait)
            except Empty:
                return True
            if command is None:
                return False
            command()
            may_wait = False

    def _admit(self, ticket: Ticket) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            request = self._texts.submit(
                ticket.prompt,
                ticket.options,
                num_samples=ticket.num_samples,
                key=ticket.key,
                num_alternatives=ticket.num_alternatives,
            )
        except Exception as error:  # noqa: BLE001 (a prompt that cannot be answered concerns its owner alone)
            self._tell(ticket.queue.put_nowait, (ticket.first, error))
            return
        ticket.request, ticket.num_open = request, ticket.num_samples
        self._tickets[request] = ticket

    def _drop(self, ticket: Ticket) -> None:
        if ticket.request is not None and self._tickets.pop(ticket.request, None) is not None:
            self._texts.cancel(ticket.request)

    def _hand_out(self, pieces: list[Piece]) -> None:
        mail: list[tuple[Ticket, list[Piece]]] = []
        now = time.perf_counter()
        for piece in pieces:
            ticket = self._tickets.get(piece.request)
            if ticket is None:
                continue
            ticket.first_at = ticket.first_at or now
            self._time(ticket, piece, now)
            ticket.held.append(piece)
            ticket.num_open -= piece.finish_reason is not None
            if ticket.num_open == 0:
                del self._tickets[piece.request]
            # Every token that wakes the loop costs its thread as much as a small request.
            if not ticket.is_whole or ticket.num_open == 0 or piece.finish_reason in ("diverged", "failed"):
                mail.append((ticket, ticket.held))
                ticket.held = []
        if mail:
            self._tell(_deliver, mail)

    def _time(self, ticket: Ticket, piece: Piece, now: float) -> None:
        """Book how long its tokens took, evenly where a step gave several."""
        last = ticket.last_at.get(piece.sample)
        ticket.last_at[piece.sample] = now
        if last is not None:
            for _ in piece.tokens:
                self._metrics.inter_token.observe((now - last) / len(piece.tokens))

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on: all who wait and all who will come are told so."""
        _log.error("the engine has stopped", exc_info=error)
        is_first, self.failure = self.failure is None, self.failure or error
        if is_first and self.on_failure is not None:
            self.on_failure()
        for ticket in self._tickets.values():
            self._tell(ticket.queue.put_nowait, (ticket.first, error))
        self._tickets.clear()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # Once for all pieces of a step, as waking a loop costs more than what it is woken for.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _deliver(mail: list[tuple[Ticket, list[Piece]]]) -> None:
    for ticket, pieces in mail:
        for piece in pieces:
            ticket.queue.put_nowait((ticket.first + piece.sample, piece))


def _settle(found: asyncio.Future[dict[str, int]], stats: dict[str, int]) -> None:
    if not found.done():
        found.set_result(stats)
