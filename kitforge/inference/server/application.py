"""What every HTTP application here has in common: its life, its refusals, how a body is read, and how it is described.

FastAPI is imported when an application is made, so that everything else works without it.
"""

# Annotations are evaluated where they stand here: FastAPI reads them, and its names exist in these functions only.

import asyncio
import contextlib
import typing
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any, Protocol, TypeVar

from kitforge.data.optional_imports import import_optional
from kitforge.inference.server.bodies import BodyBuffers, body_too_large
from kitforge.inference.server.errors import ApiError, client_closed_request
from kitforge.inference.server.metrics import ServerMetrics
from kitforge.inference.server.middleware import CLOSING, AuthMiddleware
from kitforge.inference.server.options import HttpOptions
from kitforge.inference.server.schema import set_openapi

# In the scope of a request: its body, until something has been made of it.
BODY = "kitforge.body"

REFUSALS = {
    400: "The request is wrong.",
    401: "The token is wrong or missing.",
    403: "The host is not this machine.",
    404: "There is no such model.",
    405: "The route has no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too much is asked at once.",
    500: "The model's numbers have diverged.",
    503: "The engine has stopped, or there is no room for the body.",
}
Answer = TypeVar("Answer")


class ServiceWorker(Protocol):
    """The thread that does a service's work, between `start` and `stop`."""

    failure: Exception | None
    on_failure: Callable[[], None] | None

    def start(self) -> None:
        """Begin to serve the running event loop."""
        ...

    def stop(self) -> None:
        """End after the work under way."""
        ...


class HttpService(Protocol):
    """What an application answers for."""

    name: str
    auth_tokens: tuple[str, ...]
    bodies: BodyBuffers

    @property
    def limits(self) -> HttpOptions:
        """Who may ask, and how much."""
        ...

    @property
    def metrics(self) -> ServerMetrics:
        """Its counters."""
        ...

    @property
    def worker(self) -> ServiceWorker:
        """What does its work."""
        ...

    def check_capacity(self) -> None:
        """Raise ApiError where one request more is too much at once."""
        ...


def new_application(service: HttpService, paths: Collection[str]) -> Any:
    """An application without routes; `paths` are those that it will have. Raises DependencyError where FastAPI is not
    installed."""
    for package in ("fastapi", "pydantic"):
        import_optional(package, needed_for="kitforge serve", extra="serve")
    from fastapi import FastAPI

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    # The pages of documentation that FastAPI brings fetch their scripts from elsewhere.
    app = FastAPI(title="Kitforge", docs_url=None, redoc_url=None, lifespan=life)
    set_openapi(app)

    async def refused(_request: Any, error: Exception) -> Any:
        return _response(typing.cast(ApiError, error))

    async def unknown(_request: Any, error: Exception) -> Any:
        found = typing.cast(Any, error)
        return _response(ApiError(found.status_code, str(found.detail), headers=found.headers))

    app.add_exception_handler(ApiError, refused)
    for status in (404, 405):
        app.add_exception_handler(status, unknown)
    app.add_middleware(
        AuthMiddleware, limits=service.limits, tokens=service.auth_tokens, metrics=service.metrics, paths=paths
    )
    return app


async def read_body(request: Any, service: HttpService, understand: Callable[[bytes], Answer]) -> Answer:
    """What is asked for, as `understand` makes it of the body. Raises ApiError for a body that is too large, too
    slow or wrong, or that does not come."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="invalid_content_type")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:18]) > service.limits.max_body_bytes:
        raise body_too_large(service.limits.max_body_bytes)
    # Before the body is waited for, and before anything is made of it: a server that is full has no time to lose.
    service.check_capacity()
    body = request.scope[CLOSING].enter_context(service.bodies.open())
    request.scope[BODY] = body
    content = await body.read(request.receive)
    service.check_capacity()
    # A megabyte of small values takes as long as many tokens, so nobody else waits for it.
    return await asyncio.to_thread(understand, bytes(content))


async def unless_gone(request: Any, work: Coroutine[Any, Any, Answer]) -> Answer:
    """What the work comes to; a ApiError that nobody reads as soon as the client has left."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise client_closed_request()
    finally:
        answer.cancel()
        gone.cancel()


def documented(*statuses: int) -> dict[int | str, Any]:
    """What a route's description says of those refusals."""
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    return {
        status: {"description": REFUSALS[status], "content": {"application/json": {"schema": error}}}
        for status in (*statuses, 405)
    }


def _response(refusal: ApiError) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers)
