"""The routes. FastAPI is imported when a server is made, so that everything else works without it."""

# Annotations are evaluated where they stand here: FastAPI reads them, and its names exist in these functions only.

import asyncio
import contextlib
import typing
from collections.abc import AsyncIterator, Callable
from typing import Any

from kitforge.data.extras import load_extra
from kitforge.inference.server.bodies import too_large
from kitforge.inference.server.exchange import Exchange, Prompt, Service
from kitforge.inference.server.gate import CLOSING, USAGE, Gate
from kitforge.inference.server.page import page, policy
from kitforge.inference.server.refusal import RefusalError, client_left
from kitforge.inference.server.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    ResponseOptions,
    collected,
    events,
)
from kitforge.inference.server.schema import body_schema, describe

# In the scope of a request: its body, until it has become prompts.
BODY = "kitforge.body"

_REFUSALS = {
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


def create(service: Service) -> Any:
    """The application that answers for a service. Raises DependencyError where FastAPI is not installed."""
    for package in ("fastapi", "pydantic"):
        load_extra(package, needed_for="kitforge serve", extra="serve")
    from fastapi import FastAPI

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    # The pages of documentation that FastAPI brings fetch their scripts from elsewhere.
    app = FastAPI(title="Kitforge", docs_url=None, redoc_url=None, lifespan=life)
    _add_facts(app, service)
    # The models of bodies are made as their module is loaded, so that waits until pydantic is known to be there.
    bodies = load_extra("kitforge.inference.server.requests", needed_for="kitforge serve", extra="serve")
    _add_answers(app, service, bodies)
    _add_tokenizer(app, service, bodies)
    describe(app)

    async def refused(_request: Any, error: Exception) -> Any:
        return _response(typing.cast(RefusalError, error))

    async def unknown(_request: Any, error: Exception) -> Any:
        found = typing.cast(Any, error)
        return _response(RefusalError(found.status_code, str(found.detail), headers=found.headers))

    app.add_exception_handler(RefusalError, refused)
    for status in (404, 405):
        app.add_exception_handler(status, unknown)
    app.add_middleware(Gate, limits=service.limits, tokens=service.tokens, metrics=service.metrics)
    return app


def _add_facts(app: Any, service: Service) -> None:
    """What can be asked about the server itself."""
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

    routes: FastAPI = app

    @routes.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        text = page(service.name, needs_token=bool(service.tokens))
        return HTMLResponse(text, headers={"Content-Security-Policy": policy()})

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses=_documented(503))
    async def health() -> JSONResponse:
        if service.worker.failure is not None:
            raise RefusalError(503, "the engine has stopped; the server's log says why", code="engine_stopped")
        return JSONResponse({"status": "ok"})

    @routes.get("/metrics", response_class=PlainTextResponse, responses=_documented(401, 403))
    async def metrics() -> PlainTextResponse:
        stats = await service.worker.stats()
        # Without a pause between the two, so that nothing is counted both as under way and as done.
        text, kind = service.metrics.text({"prompts": service.num_live, **stats})
        return PlainTextResponse(text, headers={"Content-Type": kind})

    @routes.get("/v1/models", responses=_documented(401, 403))
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.card()]})

    @routes.get("/v1/models/{name:path}", responses=_documented(401, 403, 404))
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.card())


def _add_answers(app: Any, service: Service, bodies: Any) -> None:
    """What the model is asked through."""
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

    routes: FastAPI = app

    @routes.post("/v1/completions", **_described(bodies.CompletionRequest))
    async def completions(request: Request) -> Response:
        asked = await _read(request, service, lambda body: bodies.read(bodies.CompletionRequest, body))
        prompts = await asyncio.to_thread(service.encode_prompts, asked)
        options = ResponseOptions(
            num_alternatives=asked.logprobs,
            has_end=True,
            has_echo=bool(asked.echo),
            prompt_logprobs=asked.prompt_logprobs,
        )
        form = CompletionFormat(service.name, service.texts, options)
        answer: Response = await _answer(request, service, asked, prompts, form)
        return answer

    @routes.post("/v1/chat/completions", **_described(bodies.ChatRequest))
    async def chat(request: Request) -> Response:
        asked = await _read(request, service, lambda body: bodies.read(bodies.ChatRequest, body))
        prompt = Prompt(tokens=await asyncio.to_thread(service.encode_chat, asked))
        options = ResponseOptions(num_alternatives=asked.num_alternatives, prompt_logprobs=asked.prompt_logprobs)
        form = ChatFormat(service.name, service.texts, options)
        answer: Response = await _answer(request, service, asked, [prompt], form)
        return answer


def _add_tokenizer(app: Any, service: Service, bodies: Any) -> None:
    """From texts to tokens and back, as vLLM has it; clients that count tokens look for all three."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    routes: FastAPI = app

    @routes.post("/tokenize", **_described(bodies.TokenizeRequest, bodies.TokenizeChatRequest, answer="tokens"))
    async def tokenize(request: Request) -> JSONResponse:
        asked = await _read(request, service, bodies.read_tokenize)
        return JSONResponse(await asyncio.to_thread(service.tokenized, asked))

    @routes.post("/detokenize", **_described(bodies.DetokenizeRequest, answer="prompt"))
    async def detokenize(request: Request) -> JSONResponse:
        asked = await _read(request, service, lambda body: bodies.read(bodies.DetokenizeRequest, body))
        return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, asked.tokens)})

    @routes.get("/tokenizer_info", responses=_documented(401, 403))
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(service.tokenizer_info())


async def _read(request: Any, service: Service, understand: Callable[[bytes], Any]) -> Any:
    """What is asked for, as `understand` makes it of the body. Raises RefusalError for a body that is too large, too
    slow or wrong, or that does not come."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusalError(
            415, "the body must be JSON; send Content-Type: application/json", code="invalid_content_type"
        )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:18]) > service.limits.max_body:
        raise too_large(service.limits.max_body)
    # Before the body is waited for, and before anything is made of it: a server that is full has no time to lose.
    service.check_room()
    body = request.scope[CLOSING].enter_context(service.bodies.open())
    request.scope[BODY] = body
    content = await body.read(request.receive)
    service.check_room()
    # A megabyte of small values takes as long as many tokens, so nobody else waits for it.
    asked = await asyncio.to_thread(understand, bytes(content))
    service.check_model(asked.model)
    return asked


async def _answer(request: Any, service: Service, asked: Any, prompts: list[Prompt], form: ResponseFormat) -> Any:
    """The answer, whole or as a stream; it ends with its client."""
    from fastapi.responses import JSONResponse, StreamingResponse

    exchange = service.open(asked, prompts)
    request.scope[CLOSING].callback(exchange.close)
    request.scope[USAGE] = exchange.usage
    # From here on the number of prompts is what is limited.
    request.scope[BODY].close()
    if asked.stream:
        await exchange.begin()
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        return StreamingResponse(
            events(form, exchange, has_usage=has_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
    return JSONResponse(await _unless_gone(request, form, exchange))


async def _unless_gone(request: Any, form: ResponseFormat, exchange: Exchange) -> dict[str, Any]:
    """The whole answer; a RefusalError that nobody reads as soon as the client has left."""
    answer = asyncio.ensure_future(collected(form, exchange))
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise client_left()
    finally:
        answer.cancel()
        gone.cancel()


def _response(refusal: RefusalError) -> Any:
    from fastapi.responses import JSONResponse

    return JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers)


def _documented(*statuses: int) -> dict[int | str, Any]:
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    return {
        status: {"description": _REFUSALS[status], "content": {"application/json": {"schema": error}}}
        for status in (*statuses, 405)
    }


def _described(*kinds: Any, answer: str = "choices") -> dict[str, Any]:
    """What the server's description of itself says of a route with a body; `answer` is a field of what it gives."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object", "required": [answer]}}}
    if answer == "choices":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": body_schema(*kinds)}}}
    responses = {200: {"description": "The answer.", "content": content}, **_documented(*_REFUSALS)}
    return {"responses": responses, "openapi_extra": {"requestBody": body}, "response_model": None}
