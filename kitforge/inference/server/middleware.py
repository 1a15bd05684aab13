"""ASGI middleware: request ids, authentication, send timeouts, metrics and the access log.

It implements ASGI (https://asgi.readthedocs.io) directly, so that it sees the end of every response.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
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

# The web UI asks for the token itself, and health checks need none.
_PUBLIC_PATHS = ("/", "/health")
_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"*, Authorization, Content-Type"),
    (b"access-control-max-age", b"600"),
]
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
    accepted. Metrics are by path, or "other" for a path outside of `paths`."""

    def __init__(
        self,
        application: Application,
        limits: HttpOptions,
        tokens: tuple[str, ...],
        metrics: ServerMetrics,
        paths: Collection[str],
    ) -> None:
        self._application = application
        self._limits = limits
        self._tokens = tokens
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        since, headers = time.perf_counter(), {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        reply = _Reply(send, request_id, self._limits.client_timeout, self._origin_headers(headers))
        try:
            with ExitStack() as closing:
                scope[CLOSING] = closing
                await self._handle(scope, headers, receive, reply)
        finally:
            self._log_request(scope, reply, time.perf_counter() - since)

    async def _handle(self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, reply: _Reply) -> None:
        # A browser asks without the token whether it may send it.
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        is_preflight = is_preflight and bool(self._origin_headers(headers))
        refusal = self._auth_error("/" if is_preflight else scope["path"], headers)
        try:
            if refusal is None and is_preflight:
                await reply.send({"type": "http.response.start", "status": 204, "headers": _PREFLIGHT})
                await reply.send({"type": "http.response.body", "body": b""})
            elif refusal is None:
                await self._application(scope, receive, reply.send)
            else:
                await send_error(refusal, reply.send)
        except TimeoutError:
            # The client has stopped reading; the server closes the connection of an incomplete response.
            pass
        except Exception:  # noqa: BLE001 (any error becomes a 500 response)
            _log.exception("request %s failed", reply.request_id)
            if not reply.has_begun:
                message = f"internal error; the server's log has details of request {reply.request_id}"
                await send_error(ApiError(500, message, code="internal_error"), reply.send)

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

    def _origin_headers(self, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What lets the page that sends a request read the response; nothing for a page that may not."""
        origin, allowed = headers.get(b"origin", b""), self._limits.allowed_origins
        if not origin or not ("*" in allowed or origin.decode("latin-1") in allowed):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]

    def _log_request(self, scope: Scope, reply: _Reply, seconds: float) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(reply.status)).inc()
        self._metrics.request_seconds.observe(seconds)
        if not self._limits.access_log:
            return
        usage = scope[USAGE]() if USAGE in scope else {}
        host, port = scope.get("client") or ("-", "-")
        # Percent-encoded, so that no path can forge log lines or terminal control codes.
        _access_log.info(
            "%s %s:%s %s %s %d prompt_tokens=%d completion_tokens=%d seconds=%.3f",
            reply.request_id,
            quote(str(host), safe=".:"),
            port,
            quote(scope["method"]),
            quote(scope["path"]),
            reply.status,
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
            seconds,
        )


class _Reply:
    """Sends the response of one request. Raises TimeoutError where the client does not read it."""

    def __init__(
        self, send: Send, request_id: str, timeout: float, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self.request_id = request_id
        self.has_begun = False
        self.status = CLIENT_CLOSED_REQUEST  # for metrics and log, until the response has been sent to its end
        self._sent_status = CLIENT_CLOSED_REQUEST
        self._send = send
        self._timeout = timeout
        self._headers = headers

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send one ASGI message."""
        if message["type"] == "http.response.start":
            self.has_begun, self._sent_status = True, message["status"]
            name = (b"x-request-id", self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), *self._headers, name]}
        async with asyncio.timeout(self._timeout):
            await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.status = self._sent_status


async def send_error(refusal: ApiError, send: Send) -> None:
    """Send an error response."""
    body = json.dumps(refusal.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
