"""Runs an HTTP server until SIGTERM or SIGINT, then drains it; its logging."""

import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import ConfigError, EngineError
from kitforge.foundation.log import logger
from kitforge.inference.server.application import HttpService
from kitforge.inference.server.middleware import ACCESS_LOG

# Keep-alive timeout in seconds. It exceeds that of clients, 5 s (httpx, OpenAI's) to 60 s (proxies): if the server
# closed first, a client could send its next request on a closed connection.
KEEP_ALIVE = 75
_log = logger(__name__)


class LogRateLimit(logging.Filter):
    """Passes a warning that clients can cause at most once in `seconds`; errors with a traceback always pass."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the record."""
        # The message without its arguments, which clients control.
        message = str(record.msg).partition("\n")[0]
        # Errors that clients cause: asyncio has run out of file descriptors, or a client has stopped reading.
        is_of_client = message.startswith(("socket.accept()", "ASGI callable returned without"))
        if record.levelno > logging.WARNING and not is_of_client:
            return True
        now = time.monotonic()
        if now < self._last.get(message, -self._seconds) + self._seconds:
            return False
        self._last[message] = now
        return True


_RATE_LIMIT = LogRateLimit()


def serve(service: HttpService, app: Any, port: int, ready: Callable[[str], None]) -> None:
    """Run the application on that port until SIGTERM or SIGINT; `ready` is called with the address once the service is
    warm, and no request is answered before. Active requests then have `serve.drain_timeout` seconds. Raises ConfigError
    where the port cannot be bound, and EngineError after the engine has failed, so that a supervisor restarts it."""
    raise_file_limit()
    server, limits = build_server(service, app), service.limits
    if limits.access_log:
        access = logging.getLogger(ACCESS_LOG)
        access.setLevel(logging.INFO)
        if not access.hasHandlers():
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            access.addHandler(handler)
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    try:
        listener = socket.create_server((limits.host, port), family=family)
    except OSError as error:
        raise ConfigError(
            "the port cannot be bound",
            got=f"{limits.host}:{port}, {error.strerror or error}",
            fix="stop the process that uses it, or choose another: port=8001",
        ) from None
    is_main = threading.current_thread() is threading.main_thread()
    # uvicorn drains and then raises the signal again, which would end a process that drained well with an error.
    former = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True)) if is_main else None
    try:
        service.warm_up()
        host = f"[{limits.host}]" if family == socket.AF_INET6 else limits.host
        ready(f"http://{host}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])
    finally:
        if is_main:
            # What comes after, and processes forked from this one, end by the signal as before.
            signal.signal(signal.SIGTERM, former)
    failure = service.worker.failure
    if failure is not None:
        raise EngineError(
            "the engine has failed, so the server has ended",
            got=f"{type(failure).__name__}: {failure}",
            fix="see its traceback above; start the server again",
        ) from failure


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        # macOS allows less than the hard limit it reports.
        _log.info("the limit of open files is unchanged: %s", error)


def build_server(service: HttpService, app: Any) -> Any:
    """A uvicorn server for the application."""
    uvicorn = import_optional("uvicorn", needed_for="kitforge serve", extra="serve")
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        # uvicorn refuses a request once so many connections are open, its own among them.
        limit_concurrency=service.limits.max_connections + 1,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(service.limits.drain_timeout)),
    )
    # Clients must not be able to fill the log.
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_RATE_LIMIT)
    return uvicorn.Server(config)
