"""What every request passes through: who may ask, how long a client may keep us waiting, and what is counted.

Written against ASGI itself (https://asgi.readthedocs.io), so that it sees the end of every answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any, final

from kitforge.inference.server.metrics import Metrics
from kitforge.inference.server.options import ServeOptions, is_loopback
from kitforge.inference.server.refusal import RefusalError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/v1/chat/completions")
# The page asks for the token itself, and whoever watches over us need not know it.
_OPEN = ("/", "/health")
# In the scope of a request: what is to be closed when its answer has ended, however it ended.
CLOSING = "kitforge.closing"


@final
class Gate:
    """Stands before an application."""

    def __init__(self, application: Application, limits: ServeOptions, metrics: Metrics) -> None:
        self._application = application
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request pass, or not."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        since, status = time.perf_counter(), 499

        async def patient(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            async with asyncio.timeout(self._limits.patience):
                await send(message)

        with ExitStack() as closing:
            scope[CLOSING] = closing
            try:
                refusal = self._refusal(scope)
                if refusal is None:
                    await self._application(scope, receive, patient)
                else:
                    await refuse(refusal, patient)
            except TimeoutError:
                # The client takes nothing any more. Returning early has the connection closed.
                status = 499
        path = scope["path"] if scope["path"] in PATHS else "other"
        self._metrics.answers[path, status] += 1
        self._metrics.duration.add(time.perf_counter() - since)

    def _refusal(self, scope: Scope) -> RefusalError | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        token = self._limits.token
        if token is None:
            # A page of another site may have its own name point to this machine, and then talk to us as our own would.
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if not is_loopback(name):
                return RefusalError(403, f"the host {host[:200]!r} is not this machine", code="wrong_host")
            return None
        given = headers.get(b"authorization", b"")
        if scope["path"] in _OPEN or hmac.compare_digest(given, b"Bearer " + token.encode()):
            return None
        message = "the token is wrong or missing; send it as `Authorization: Bearer TOKEN`"
        return RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def refuse(refusal: RefusalError, send: Send) -> None:
    """Send a refusal as it is."""
    body = json.dumps(refusal.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
