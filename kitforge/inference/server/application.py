"""The common part of all HTTP applications: lifespan, error handlers, request bodies, OpenAPI schema.

FastAPI is imported when an application is made, so it stays optional.
"""

import asyncio
import contextlib
import difflib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from kitforge.core.checkpoint.shard_writer import package_version
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import ContextLengthError, DataError, KitforgeError
from kitforge.inference.server.authentication import auth_tokens
from kitforge.inference.server.batcher import LoopThread
from kitforge.inference.server.errors import ApiError, client_closed_request
from kitforge.inference.server.metrics import ServerMetrics
from kitforge.inference.server.middleware import AuthMiddleware
from kitforge.inference.server.options import HttpOptions
from kitforge.inference.server.web_ui import content_security_policy, docs_page

REFUSALS = {
    400: "The request is invalid.",
    401: "The token is wrong or missing.",
    403: "The Host header does not name this machine.",
    404: "Unknown model.",
    405: "The route does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many concurrent requests.",
    500: "The model's outputs are not finite.",
    503: "The engine has stopped, or too many bodies are being received.",
}
Answer = TypeVar("Answer")


class HttpService(ABC):
    """What an application serves. `worker` processes the requests; `threads` run as long as the application."""

    worker: LoopThread
    threads: Sequence[Any]  # with `start` and `stop`
    max_model_len: int  # of a language model: tokens of a text

    def __init__(self, name: str, limits: HttpOptions, metrics: ServerMetrics) -> None:
        self.name = limits.name or name
        self.model_names = [self.name]
        self.created = int(time.time())
        self.limits = limits
        self.metrics = metrics
        self.auth_tokens = auth_tokens(limits)
        self.num_active = 0  # active and waiting requests, of a language model: prompts
        self.num_body_bytes = 0  # of all bodies that are being received or parsed

    def status(self) -> dict[str, Any]:
        """The response of /health, beside `status`."""
        return {}

    def model_card(self, name: str) -> dict[str, Any]:
        """The entry of the base model or an adapter in /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "kitforge",
            "max_model_len": self.max_model_len,
            "root": self.name,
            "parent": None if name == self.name else self.name,
        }

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless `name` is None, the model's or that of an adapter."""
        if name is not None and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"unknown model {name[:200]!r}; this server has {known}"
            raise ApiError(404, message, parameter="model", code="model_not_found")

    def summary(self) -> dict[str, str]:
        """What the operator is told at the start, by topic."""
        return {"token": "needed" if self.auth_tokens else "none needed, on this machine alone"}

    def warm_up(self) -> None:
        """Run what is slow when it first runs. Default: nothing is."""

    @abstractmethod
    async def rendered_metrics(self) -> tuple[bytes, str]:
        """The response of /metrics, and its content type."""

    def check_capacity(self, num_more: int = 1) -> None:
        """Raise ApiError where so many more exceed `serve.max_requests`."""
        most = self.limits.max_requests
        if self.num_active + num_more > most:
            message = f"{most} requests are active already; retry in a second"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    def api_error(self, error: Exception) -> ApiError:
        """400 for what the engine refuses; 503 without details for an engine that has stopped."""
        if isinstance(error, KitforgeError) and self.worker.failure is None:
            is_too_long = isinstance(error, ContextLengthError)
            parameter = "prompt" if is_too_long or isinstance(error, DataError) else None
            code = "context_length_exceeded" if is_too_long else "invalid_value"
            return ApiError(400, str(error), parameter=parameter, code=code)
        return ApiError(503, "the engine has stopped; the server's log says why", code="engine_stopped")


def new_application(service: HttpService) -> Any:
    """An application with the routes that all services have. Raises DependencyError where FastAPI is not installed."""
    for package in ("fastapi", "pydantic"):
        import_optional(package, needed_for="kitforge serve", extra="serve")
    from fastapi import FastAPI
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import JSONResponse

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        for thread in service.threads:
            thread.start()
        yield
        for thread in reversed(service.threads):
            await asyncio.to_thread(thread.stop)

    async def on_error(request: Any, error: Any) -> JSONResponse:
        if not isinstance(error, ApiError):
            error = _route_error(request, error)
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    handlers: Any = dict.fromkeys((ApiError, 404, 405), on_error)
    # FastAPI's documentation pages load scripts from other hosts; /docs is ours.
    app: Any = FastAPI(title="Kitforge", docs_url=None, redoc_url=None, lifespan=life, exception_handlers=handlers)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = FastAPI.openapi(app)
            schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            # A server on the loopback address needs no token.
            schema["security"] = [{"token": []}, {}]
        result: dict[str, Any] = app.openapi_schema
        return result

    app.openapi = openapi

    limits = service.limits
    app.add_middleware(AuthMiddleware, limits=limits, tokens=service.auth_tokens, metrics=service.metrics)
    if limits.allowed_origins:
        # Outermost: a browser asks without the token whether it may send it.
        origins, methods = list(limits.allowed_origins), ["GET", "POST"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])

    _add_common_routes(app, service)
    return app


def _route_error(request: Any, error: Any) -> ApiError:
    """The 404 of a path without a route, and the 405 of a route that does not support the method."""
    path, got, headers = request.url.path[:200], f"{request.method[:20]} {request.url.path[:200]}", error.headers or {}
    if error.status_code == 405:
        words = KitforgeError("the route does not support this method", got=got, expected=headers.get("Allow"))
        return ApiError(405, str(words), code="wrong_method", headers=headers)
    paths = request.app.openapi()["paths"]
    near = difflib.get_close_matches(path, paths, 1)
    fix = f"did you mean {near[0]}?" if near else "see /docs, the list of routes"
    words = KitforgeError("there is no such route", got=got, expected=", ".join(paths), fix=fix)
    return ApiError(404, str(words), code="unknown_route")


def _add_common_routes(app: Any, service: HttpService) -> None:
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

    routes: FastAPI = app

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses=documented(503))
    async def health() -> JSONResponse:
        if service.worker.failure is not None:
            raise service.api_error(service.worker.failure)
        return JSONResponse({"status": "ok", **service.status()})

    @routes.get("/version", responses=documented(401, 403))
    async def version() -> JSONResponse:
        return JSONResponse({"version": package_version()})

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        policy = {"Content-Security-Policy": content_security_policy()}
        return HTMLResponse(docs_page(service.name, app.openapi()["paths"]), headers=policy)

    @routes.get("/metrics", response_class=PlainTextResponse, responses=documented(401, 403))
    async def metrics() -> PlainTextResponse:
        text, kind = await service.rendered_metrics()
        return PlainTextResponse(text, headers={"Content-Type": kind})


async def read_body(
    request: Any, service: HttpService, parse: Callable[[bytes], Answer], *, num_more: int = 1
) -> Answer:
    """Read a JSON body and parse it with `parse`. Raises ApiError for a body that is too large, too slow or invalid."""
    limits, content, has_more = service.limits, bytearray(), True
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="invalid_content_type")
    length = request.headers.get("content-length", "0")
    _check_body_size(int(length[:18]) if length.isdecimal() else 0, limits)
    # Checked before reading the body: a full server must refuse quickly.
    service.check_capacity(num_more)
    try:
        async with asyncio.timeout(limits.client_timeout):
            while has_more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise client_closed_request()
                chunk, has_more = message.get("body", b""), message.get("more_body", False)
                content += chunk
                service.num_body_bytes += len(chunk)
                _check_body_size(len(content), limits)
                if service.num_body_bytes > limits.max_inflight_bytes:
                    words = f"the bodies of all requests exceed {limits.max_inflight_bytes} bytes; retry in a second"
                    raise ApiError(503, words, code="server_busy", headers={"Retry-After": "1"})
        # Parsing a large body takes long, so it must not block the event loop.
        return await asyncio.to_thread(parse, bytes(content))
    except TimeoutError:
        # The rest of the body may never arrive.
        words, headers = f"the body did not arrive within {limits.client_timeout:g} s", {"Connection": "close"}
        raise ApiError(408, words, code="body_too_slow", headers=headers) from None
    finally:
        service.num_body_bytes -= len(content)


def _check_body_size(size: int, limits: HttpOptions) -> None:
    if size > limits.max_body_bytes:
        raise ApiError(413, f"the body is larger than {limits.max_body_bytes} bytes", code="body_too_large")


async def unless_gone(request: Any, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of the work; raises ApiError as soon as the client disconnects."""
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
    """The OpenAPI description of error responses."""
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    return {
        status: {"description": REFUSALS[status], "content": {"application/json": {"schema": error}}}
        for status in (*statuses, 405)
    }


def described(body: Any, reply: Any, *, has_events: bool = False) -> dict[str, Any]:
    """The OpenAPI description of a route with JSON bodies, by their schemas, whose reply may be a stream of events."""
    content = {"application/json": {"schema": reply}}
    if has_events:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "responses": {200: {"description": "The response.", "content": content}, **documented(*REFUSALS)},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
        "response_model": None,
    }


def body_schema(schema: Any, named: Mapping[str, Any]) -> Any:
    """A JSON Schema with references to `named` inlined, without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [body_schema(each, named) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return body_schema(named[schema["$ref"].rpartition("/")[2]], named)
    result = {}
    for name, each in schema.items():
        if name == "properties":
            result[name] = {field: body_schema(value, named) for field, value in each.items()}
        elif name not in ("$defs", "title"):
            result[name] = body_schema(each, named)
    return result
