"""A server from start to end: until it is told to stop, and then until what was asked has been answered."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import ConfigError, EngineError
from kitforge.inference.server.application import HttpService
from kitforge.inference.server.connections import ConnectionLimit, connection_limits, protocol_of, raise_file_limit
from kitforge.inference.server.logs import limit_log_rate, write_access_log

# Seconds that a connection may rest between two requests. Where the server ends it first, a client that is just then
# sending its next request on it sees it break; clients keep theirs for 5 s (httpx, OpenAI's) to 60 s (proxies).
KEEP_ALIVE = 75


def serve(service: HttpService, app: Any, port: int, ready: Callable[[str], None]) -> None:
    """Answer by an application on that port until SIGTERM or SIGINT; `ready` is told the address. What is being
    answered then has `serve.drain_timeout` seconds. Raises ConfigError where the port cannot be listened on, and
    EngineError once the engine has failed, so that whoever watches over this process starts it again."""
    raise_file_limit()
    server, limits = build_server(service, app), service.limits
    if limits.access_log:
        write_access_log()
    service.worker.on_failure = lambda: setattr(server, "should_exit", True)
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    try:
        listener = socket.create_server((limits.host, port), family=family)
    except OSError as error:
        raise ConfigError(
            "the port cannot be listened on",
            got=f"{limits.host}:{port}, {error.strerror or error}",
            fix="stop what uses it, or choose another: port=8001",
        ) from None
    if threading.current_thread() is threading.main_thread():
        # uvicorn drains first and then raises the signal once more, which is the end of a process that did well.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    host = f"[{limits.host}]" if family == socket.AF_INET6 else limits.host
    ready(f"http://{host}:{listener.getsockname()[1]}")
    server.run(sockets=[listener])
    failure = service.worker.failure
    if failure is not None:
        raise EngineError(
            "the engine has failed, so the server has ended",
            got=f"{type(failure).__name__}: {failure}",
            fix="its traceback stands above; start the server again",
        ) from failure


def build_server(service: HttpService, app: Any) -> Any:
    """What answers for a service by its application on sockets that are listening."""
    uvicorn = import_optional("uvicorn", needed_for="kitforge serve", extra="serve")
    max_connections, backlog = connection_limits(service.limits)
    limit = ConnectionLimit(max_connections, service.metrics.evicted_connections.inc)
    config = uvicorn.Config(
        app,
        http=protocol_of(limit, service.limits.client_timeout),
        ws="none",
        backlog=backlog,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(service.limits.drain_timeout)),
    )
    limit_log_rate()
    return uvicorn.Server(config)
