"""ASGI middleware: request ids, authentication, send timeouts, metrics and the access log.

It implements ASGI (https://asgi.readthedocs.io) directly, so that it sees the end of every response.
"""

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from kitforge.foundation.log import logger
from kitforge.inference.server.authentication import has_token
from kitforge.inference.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from kitforge.inference.server.metrics import ServerMetrics
from kitforge.inference.server.options import HttpOptions, is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# The web UI asks for the token itself, a link to /docs cannot send one, and health checks need none.
_PUBLIC_PATHS = ("/", "/docs", "/health")
# ASGI scope key: an ExitStack that is closed when the response has ended, however it ended.
CLOSING = "kitforge.closing"
# ASGI scope key: a function that returns the token usage, for requests that have one.
USAGE = "kitforge.usage"

ACCESS_LOG = "kitforge.access"
_log = logger(__name__)
_access_log = logger(ACCESS_LOG)
# Request ids accepted from clients; other characters could forge log lines.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class AuthMiddleware:
    """Authenticates, counts and logs the requests of an application. Without `tokens` only clients of this machine are
    accepted. Metrics are by path, or "other" for a path without a route."""

    def __init__(
        self, application: Application, limits: HttpOptions, tokens: tuple[str, ...], metrics: ServerMetrics
    ) -> None:
        self._application = application
        self._limits = limits
        self._tokens = tokens
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        since, headers = time.perf_counter(), {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        sent: int | None = None  # the status, once the response has begun
        status = CLIENT_CLOSED_REQUEST  # until the response has been sent to its end

        async def reply(message: MutableMapping[str, Any]) -> None:
            nonlocal sent, status
            if message["type"] == "http.response.start":
                sent = message["status"]
                name = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), name]}
            async with asyncio.timeout(self._limits.client_timeout):
                await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                status = sent or status

        try:
            with ExitStack() as closing:
                scope[CLOSING] = closing
                refusal = self._auth_error(scope["path"], headers)
                if refusal is None:
                    await self._application(scope, receive, reply)
                else:
                    await send_error(refusal, reply)
        except TimeoutError:
            # The client has stopped reading; the server closes the connection of an incomplete response.
            pass
        except Exception:  # noqa: BLE001 (any error becomes a 500 response)
            _log.exception("request %s failed", request_id)
            if sent is None:
                message = f"internal error; the server's log has details of request {request_id}"
                await send_error(ApiError(500, message, code="internal_error"), reply)
        finally:
            self._log_request(scope, request_id, status, time.perf_counter() - since)

    def _auth_error(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        if not self._tokens:
            # DNS rebinding: a foreign page may let its own host name point to this machine.
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if not is_loopback(name):
                return ApiError(403, f"the Host header {host[:200]!r} does not name this machine", code="wrong_host")
            return None
        if path in _PUBLIC_PATHS or has_token(headers.get(b"authorization", b""), self._tokens):
            return None
        message = "the token is wrong or missing; send it as `Authorization: Bearer TOKEN`"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _log_request(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        paths = {route.path for route in scope["app"].routes}
        self._metrics.requests.labels(scope["path"] if scope["path"] in paths else "other", str(status)).inc()
        self._metrics.request_seconds.observe(seconds)
        if not self._limits.access_log:
            return
        usage = scope[USAGE]() if USAGE in scope else {}
        host, port = scope.get("client") or ("-", "-")
        # Percent-encoded, so that no path can forge log lines or terminal control codes.
        _access_log.info(
            "%s %s:%s %s %s %d prompt_tokens=%d completion_tokens=%d seconds=%.3f",
            request_id,
            quote(str(host), safe=".:"),
            port,
            quote(scope["method"]),
            quote(scope["path"]),
            status,
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
            seconds,
        )


async def send_error(refusal: ApiError, send: Send) -> None:
    """Send an error response."""
    body = json.dumps(refusal.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
