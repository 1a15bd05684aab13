"""Limits on open connections and on the time a request's header takes, which uvicorn does not have."""

import asyncio
import json
import os
import resource
from collections.abc import Callable
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.log import logger
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.middleware import ABORT
from kitforge.inference.server.options import HttpOptions

_log = logger(__name__)
# Turns of the event loop in which a connection beyond the limit is open, from `accept` to `close`; each may accept as
# many as the listen backlog.
_TURNS = 4
_BACKLOG = 2048
# File descriptors reserved for everything but connections.
_SPARE = 32


class ConnectionLimit:
    """Tracks open connections. A connection is busy from the end of its request to the end of the response; otherwise
    it is idle and may be closed to make room."""

    def __init__(self, max_connections: int, on_evict: Callable[[], None]) -> None:
        self._max_connections = max_connections
        self._on_evict = on_evict
        self._idle: dict[asyncio.Transport, None] = {}  # longest idle first
        self._busy: set[asyncio.Transport] = set()

    def open(self, transport: asyncio.Transport) -> bool:
        """Register a new connection, closing the longest idle one at the limit. False: all others are busy, so this one
        must be refused."""
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
        """Set whether a complete request of the connection is being processed."""
        if is_busy:
            self._idle.pop(transport, None)
            self._busy.add(transport)
        elif transport in self._busy:
            self._busy.discard(transport)
            self._idle[transport] = None

    def close(self, transport: asyncio.Transport) -> None:
        """Forget a closed connection."""
        self._idle.pop(transport, None)
        self._busy.discard(transport)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        # macOS allows less than the hard limit it reports.
        _log.info("the limit of open files is unchanged: %s", error)


def connection_limits(limits: HttpOptions) -> tuple[int, int]:
    """The limits of open connections and of the listen backlog, such that file descriptors never run out."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return limits.max_connections, _BACKLOG
    free = allowed - len(os.listdir("/dev/fd")) - _SPARE
    backlog = max(1, min(_BACKLOG, free // (2 * _TURNS)))
    most = max(1, min(limits.max_connections, free - _TURNS * backlog))
    if most < limits.max_connections:
        words = (
            "%d connections may be open at once instead of serve.max_connections=%d: %d files may be open (ulimit -n)"
        )
        _log.warning(words, most, limits.max_connections, allowed)
    return most, backlog


class _ConnectionTimer:
    """The timeout of one connection."""

    def __init__(self, limit: ConnectionLimit, timeout: float, transport: asyncio.Transport) -> None:
        self._limit = limit
        self._timeout = timeout
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self.is_refused = not limit.open(transport)
        self.wait()

    def update(self, cycle: Any, *, is_waiting: bool) -> None:
        """Update after received bytes or a finished response. `cycle` is uvicorn's latest request and response."""
        has_request = cycle is not None and not cycle.response_complete
        self._limit.mark(self._transport, is_busy=has_request and not cycle.more_body)
        if has_request:
            # From here on the middleware limits the time of body and response.
            cycle.scope[ABORT] = self._transport.abort
            self._stop()
        elif is_waiting:
            self.wait()

    def wait(self) -> None:
        """Abort the connection after `timeout`, counted from the first call."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._transport.abort)

    def end(self) -> None:
        """The connection has closed."""
        self._limit.close(self._transport)
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_of(limit: ConnectionLimit, timeout: float) -> Any:
    """uvicorn's HTTP/1.1 protocol class with limits: a header must arrive, and the rest of a response on a closing
    connection must be read, within `timeout` seconds."""
    impl = import_optional("uvicorn.protocols.http.h11_impl", needed_for="kitforge serve", extra="serve")

    class LimitedProtocol(impl.H11Protocol):  # type: ignore[misc, name-defined]
        """Overrides the methods through which uvicorn reports requests and responses."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.watch = _ConnectionTimer(limit, timeout, transport)
            if self.watch.is_refused:
                transport.write(_FULL)
                transport.write_eof()

        def data_received(self, data: bytes) -> None:
            # Bytes after a refusal are read and ignored; closing at once would lose the response.
            if not self.watch.is_refused:
                super().data_received(data)
                self.watch.update(self.cycle, is_waiting=True)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # Between two requests uvicorn's keep-alive timeout applies, but not after a request that was refused before
            # its body arrived.
            self.watch.update(self.cycle, is_waiting=self.cycle.more_body or self.transport.is_closing())

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.watch.wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self.watch.end()
            super().connection_lost(exc)

        def _unsupported_upgrade_warning(self) -> None:
            """A WebSocket upgrade gets an HTTP response and no log line."""

    return LimitedProtocol


_BODY = json.dumps(
    ApiError(503, "too many connections with active requests; retry in a second", code="server_busy").body()
).encode()
_FULL = (
    f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}\r\n"
    "retry-after: 1\r\nconnection: close\r\n\r\n"
).encode() + _BODY
