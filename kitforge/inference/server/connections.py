"""Connections: how many may be open, how long one may stay silent, and which one makes room for others.

uvicorn has no limit on the time that the header of a request takes, and none on open connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Callable
from typing import Any, final

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.log import logger
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.middleware import ABORT
from kitforge.inference.server.options import HttpOptions

_log = logger(__name__)
# Connections that the system keeps until they are accepted. All of them may be accepted before one can be closed.
_BACKLOG = 2048
# Descriptors left to everything but connections: files of the model, a log, what others open in this process.
_SPARE = 32


@final
class ConnectionLimit:
    """Which connections are open. One whose request has arrived as a whole is busy until it is answered; any other is
    idle, and makes room for new ones."""

    def __init__(self, max_connections: int, on_evict: Callable[[], None]) -> None:
        self._max_connections = max_connections
        self._on_evict = on_evict
        self._idle: dict[asyncio.Transport, None] = {}  # the one that has been idle longest first
        self._busy: set[asyncio.Transport] = set()

    def open(self, transport: asyncio.Transport) -> bool:
        """Count a new connection, for which the longest idle one is closed where there are too many. False: all others
        are busy, so this one must be told to come again."""
        is_full = len(self._idle) + len(self._busy) >= self._max_connections
        has_room = not is_full or bool(self._idle)
        if is_full and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.abort()
            self._on_evict()
        self._idle[transport] = None
        return has_room

    def mark(self, transport: asyncio.Transport, *, is_busy: bool) -> None:
        """Whether a whole request of it is under way."""
        if is_busy:
            self._idle.pop(transport, None)
            self._busy.add(transport)
        elif transport in self._busy:
            self._busy.discard(transport)
            self._idle[transport] = None

    def close(self, transport: asyncio.Transport) -> None:
        """Count it no more."""
        self._idle.pop(transport, None)
        self._busy.discard(transport)


def raise_file_limit() -> None:
    """Let this process open as many files as its user may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        # Some systems (macOS) allow less than they say.
        _log.info("the number of open files stays as it is: %s", error)


def connection_limits(limits: HttpOptions) -> tuple[int, int]:
    """How many connections may be open, and how many may wait to be accepted, so that descriptors never run out."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return limits.max_connections, _BACKLOG
    free = allowed - len(os.listdir("/dev/fd")) - _SPARE
    backlog = max(1, min(_BACKLOG, free // 4))
    most = max(1, min(limits.max_connections, free - backlog))
    if most < limits.max_connections:
        words = (
            "%d connections may be open at once instead of serve.max_connections=%d: %d files may be open (ulimit -n)"
        )
        _log.warning(words, most, limits.max_connections, allowed)
    return most, backlog


@final
class _ConnectionTimer:
    """How long one connection may keep us waiting."""

    def __init__(self, limit: ConnectionLimit, timeout: float, transport: asyncio.Transport) -> None:
        self._limit = limit
        self._timeout = timeout
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self.is_refused = not limit.open(transport)
        self.wait()

    def update(self, cycle: Any, *, is_waiting: bool) -> None:
        """After bytes that came or an answer that ended. `cycle` is uvicorn's request and answer: the latest ones."""
        has_request = cycle is not None and not cycle.response_complete
        self._limit.mark(self._transport, is_busy=has_request and not cycle.more_body)
        if has_request:
            # How long a body or an answer may take is known behind the gate.
            cycle.scope[ABORT] = self._transport.abort
            self._stop()
        elif is_waiting:
            self.wait()

    def wait(self) -> None:
        """End the connection after `timeout`, counted from the first call."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._transport.abort)

    def end(self) -> None:
        """The connection is no more."""
        self._limit.close(self._transport)
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_of(limit: ConnectionLimit, timeout: float) -> Any:
    """The class of uvicorn's HTTP/1.1 protocol, with limits: a header must come within `timeout` seconds, and what is
    left of an answer must be taken in them once its connection is to be closed."""
    impl = import_optional("uvicorn.protocols.http.h11_impl", needed_for="kitforge serve", extra="serve")

    @final
    class LimitedProtocol(impl.H11Protocol):  # type: ignore[misc, name-defined]
        """uvicorn tells of requests and answers through these methods alone."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.watch = _ConnectionTimer(limit, timeout, transport)
            if self.watch.is_refused:
                transport.write(_FULL)
                transport.write_eof()

        def data_received(self, data: bytes) -> None:
            # What a client goes on to say after a refusal is read, as its answer would be lost with it otherwise.
            if not self.watch.is_refused:
                super().data_received(data)
                self.watch.update(self.cycle, is_waiting=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # A connection that rests between two requests has the time of uvicorn's own timeout; one whose request has
            # been refused before its body was there does not rest.
            self.watch.update(self.cycle, is_waiting=self.cycle.more_body or self.transport.is_closing())

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.watch.wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self.watch.end()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """Whoever asks for a WebSocket is answered over HTTP, and fills no log."""

    return LimitedProtocol


def _full() -> bytes:
    words = "too many connections are open, each with a request under way; come again in a second"
    body = json.dumps(ApiError(503, words, code="server_busy").body()).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + body


_FULL = _full()
