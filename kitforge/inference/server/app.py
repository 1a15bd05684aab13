"""The OpenAI-compatible routes of the text-generation server. FastAPI is imported when they are made."""

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kitforge.data.optional_imports import import_optional
from kitforge.inference.server.application import (
    HttpService,
    body_schema,
    described,
    documented,
    new_application,
    read_body,
    unless_gone,
)
from kitforge.inference.server.errors import named_as
from kitforge.inference.server.item_format import ItemFormat
from kitforge.inference.server.middleware import CLOSING, USAGE
from kitforge.inference.server.responses import (
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    ResponseOptions,
    TokenFormat,
)
from kitforge.inference.server.scores import ScoreService, cosines, embed
from kitforge.inference.server.service import EncodedPrompt, RequestHandle, Service
from kitforge.inference.server.web_ui import content_security_policy, page, rendered
from kitforge.inference.text_engine import TextDelta

# Request bodies need pydantic, so their modules are imported once there is a server.
BODIES = "kitforge.inference.server.requests"
ITEM_BODIES, SCORE_BODIES = "kitforge.inference.server.item_requests", "kitforge.inference.server.score_requests"
# The score of each text for a model, and the number of their tokens; see `scores`.
Score = Callable[[Sequence[Any], str | None], Coroutine[Any, Any, tuple[list[float], int]]]


def create_app(service: Service) -> Any:
    """The FastAPI application of a service. Raises DependencyError where FastAPI is not installed."""
    app = new_application(service)
    _add_info_routes(app, service)
    bodies = _module(BODIES)
    _add_completion_routes(app, service, bodies, _module(ITEM_BODIES))
    _add_embedding_route(app, service)
    _add_score_routes(app, service, partial(cosines, service))
    _add_tokenizer_routes(app, service, bodies)
    return app


def create_score_app(service: ScoreService) -> Any:
    """The FastAPI application of a model that gives scores. Raises DependencyError where FastAPI is not installed."""
    app = new_application(service)
    _add_info_routes(app, service)
    _add_score_routes(app, service, service.scores)
    return app


def _module(name: str) -> Any:
    """One of request bodies, which needs pydantic, whose presence `new_application` has checked."""
    return import_optional(name, needed_for="kitforge serve", extra="serve")


def _add_info_routes(app: Any, service: HttpService) -> None:
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, JSONResponse

    routes: FastAPI = app

    if isinstance(service, Service):

        @routes.get("/", include_in_schema=False)
        async def root() -> HTMLResponse:
            text = page(service.name, needs_token=bool(service.auth_tokens), **service.page_facts())
            return HTMLResponse(text, headers={"Content-Security-Policy": content_security_policy()})

    @routes.get("/v1/models", responses=documented(401, 403))
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [service.model_card(name) for name in service.model_names]})

    @routes.get("/v1/models/{name:path}", responses=documented(401, 403, 404))
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(service.model_card(name))


def _add_completion_routes(app: Any, service: Service, bodies: Any, items: Any) -> None:
    """Completions, of texts and of tokens, and chats, also in the words of the Responses API."""
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

    routes: FastAPI = app

    @routes.post("/v1/completions", **_described(bodies.CompletionRequest))
    async def completions(request: Request) -> Response:
        params = await _read(request, service, lambda body: bodies.read(bodies.CompletionRequest, body))
        prompts = await asyncio.to_thread(service.encode_prompts, params)
        options = ResponseOptions(
            num_top_logprobs=params.logprobs,
            has_stop_token=True,
            has_echo=bool(params.echo),
            prompt_logprobs=params.prompt_logprobs,
        )
        form = CompletionFormat(params.model or service.name, service.token_texts, options)
        response: Response = await _respond(request, service, params, prompts, form)
        return response

    @routes.post("/v1/chat/completions", **_described(bodies.ChatRequest))
    async def chat(request: Request) -> Response:
        params = await _read(request, service, lambda body: bodies.read(bodies.ChatRequest, body))
        prompt = await asyncio.to_thread(service.encode_chat, params)
        options = ResponseOptions(
            num_top_logprobs=params.num_top_logprobs,
            prompt_logprobs=params.prompt_logprobs,
            names_call=params.names_call,
        )
        form = ChatFormat(params.model or service.name, service.token_texts, options)
        response: Response = await _respond(request, service, params, [prompt], form)
        return response

    @routes.post("/inference/v1/generate", **_described(bodies.GenerateRequest))
    async def generate(request: Request) -> Response:
        body = await _read(request, service, lambda body: bodies.read(bodies.GenerateRequest, body))
        with named_as({"prompt": "token_ids"}):
            params = body.sampling()
            options = ResponseOptions(
                num_top_logprobs=params.num_top_logprobs, prompt_logprobs=params.prompt_logprobs, is_token_exact=True
            )
            form = TokenFormat(body.model or service.name, service.token_texts, options)
            prompt = EncodedPrompt(tokens=body.token_ids)
            response: Response = await _respond(request, service, params, [prompt], form)
        return response

    @routes.post("/v1/responses", **_described(items.ItemsRequest, required="output", has_events=True))
    async def responses(request: Request) -> Response:
        asked, params = await read_body(request, service, items.read_items)
        service.check_model(asked.model)
        with named_as(items.ITEM_NAMES):
            prompt = await asyncio.to_thread(service.encode_chat, params)
            form = ItemFormat(asked.model or service.name, asked.echo(service.defaults))
            response: Response = await _respond(request, service, params, [prompt], form)
        return response


def _add_embedding_route(app: Any, service: Service) -> None:
    from fastapi import FastAPI, Request
    from fastapi.responses import Response

    routes: FastAPI = app
    bodies, read = _module(SCORE_BODIES), _module(BODIES).read

    @routes.post("/v1/embeddings", **_described(bodies.EmbeddingRequest, required="data"))
    async def embeddings(request: Request) -> Response:
        params = await _read(request, service, partial(read, bodies.EmbeddingRequest))
        vectors, num_tokens = await unless_gone(request, embed(service, params.texts(), params.model, params))
        head = _head(request, params.model or service.name, num_tokens) | {"object": "list"}
        is_packed = params.encoding_format == "base64"
        content = await asyncio.to_thread(_embedding_list, head, vectors, is_packed=is_packed)
        return Response(content, media_type="application/json")


def _add_score_routes(app: Any, service: HttpService, score: Score) -> None:
    """Scores as in vLLM's API, and documents in their order as in Jina's."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    routes: FastAPI = app
    bodies, read = _module(SCORE_BODIES), _module(BODIES).read

    async def scored(request: Request, kind: Any) -> tuple[Any, list[float], dict[str, Any]]:
        params = await _read(request, service, partial(read, kind))
        with named_as({"text": params.field}):
            scores, num_tokens = await unless_gone(request, score(params.texts(), params.model))
        head = _head(request, params.model or service.name, num_tokens)
        return params, scores, head | {"id": secrets.token_hex(16), "created": int(time.time())}

    async def scores(request: Request) -> JSONResponse:
        _, found, head = await scored(request, bodies.ScoreRequest)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]
        return JSONResponse(head | {"object": "list", "data": data})

    async def rerank(request: Request) -> JSONResponse:
        params, found, head = await scored(request, bodies.RerankRequest)
        order = sorted(range(len(found)), key=lambda index: -found[index])[: params.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": found[index]} for index in order]
        for each in results if params.return_documents is not False else ():
            each["document"] = {"text": params.documents[each["index"]]}
        return JSONResponse(head | {"results": results})

    for path in ("/score", "/v1/score"):
        routes.post(path, **_described(bodies.ScoreRequest, required="data"))(scores)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, **_described(bodies.RerankRequest, required="results"))(rerank)


def _embedding_list(head: dict[str, Any], vectors: Sequence[Tensor], *, is_packed: bool) -> str:
    """The response with its vectors as numbers, or as OpenAI's client asks for them: in base64 of float32, the least
    byte first. One after the other, as a million numbers at once would hold up all other threads."""
    rows = []
    for index, vector in enumerate(vectors):
        packed = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode("ascii") if is_packed else None
        rows.append(json.dumps({"object": "embedding", "index": index, "embedding": packed or vector.tolist()}))
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(rows)}]}}'


def _head(request: Any, model: str, num_tokens: int) -> dict[str, Any]:
    """The model and the usage of a response."""
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    request.scope[USAGE] = lambda: usage
    return {"model": model, "usage": usage}


def _add_tokenizer_routes(app: Any, service: Service, bodies: Any) -> None:
    """Tokenizer routes as in vLLM, which clients use to count tokens."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    routes: FastAPI = app

    @routes.post("/tokenize", **_described(bodies.TokenizeRequest, bodies.TokenizeChatRequest, required="tokens"))
    async def tokenize(request: Request) -> JSONResponse:
        params = await _read(request, service, bodies.read_tokenize)
        return JSONResponse(await asyncio.to_thread(service.tokenize, params))

    @routes.post("/detokenize", **_described(bodies.DetokenizeRequest, required="prompt"))
    async def detokenize(request: Request) -> JSONResponse:
        params = await _read(request, service, lambda body: bodies.read(bodies.DetokenizeRequest, body))
        return JSONResponse({"prompt": await asyncio.to_thread(service.tokenizer.decode, params.tokens)})

    @routes.post("/markdown", include_in_schema=False)
    async def markdown(request: Request) -> JSONResponse:
        # It takes no place in the engine, which the reply that it renders may fill.
        found = await read_body(request, service, lambda body: bodies.read(bodies.MarkdownRequest, body), num_more=0)
        return JSONResponse({"html": await asyncio.to_thread(lambda: [*map(rendered, found.texts)])})

    @routes.get("/tokenizer_info", responses=documented(401, 403))
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(service.tokenizer_info())


async def _read(request: Any, service: HttpService, parse: Callable[[bytes], Any]) -> Any:
    """The parsed body of a request for this model. Raises ApiError."""
    params = await read_body(request, service, parse)
    service.check_model(params.model)
    return params


async def _respond(
    request: Any, service: Service, params: Any, prompts: list[EncodedPrompt], form: ResponseFormat | ItemFormat
) -> Any:
    """The response, full or streamed. A disconnect of the client cancels it."""
    from fastapi.responses import JSONResponse, StreamingResponse

    handle = service.submit(params, prompts, await service.constraint(params, prompts[0]))
    request.scope[CLOSING].callback(handle.close)
    request.scope[USAGE] = handle.usage
    if params.stream:
        await handle.wait_until_started()
        chosen = params.stream_options
        has_usage = chosen is not None and chosen.include_usage
        is_continuous = has_usage and bool(chosen.continuous_usage_stats)
        return StreamingResponse(
            form.events(handle, has_usage=has_usage, is_continuous=is_continuous),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
    return JSONResponse(await unless_gone(request, _full(form, handle)))


async def _full(form: ResponseFormat | ItemFormat, handle: RequestHandle) -> dict[str, Any]:
    """The response body, once all choices have finished."""
    deltas: list[list[TextDelta]] = [[] for _ in range(handle.num_choices)]
    async for index, delta in handle.deltas():
        deltas[index].append(delta)
    if form.options.num_top_logprobs is None and form.options.prompt_logprobs is None:
        return form.response_body(handle, deltas)
    # Serialising many tokens takes long, so it must not block the event loop.
    return await asyncio.to_thread(form.response_body, handle, deltas)


def _described(*kinds: Any, required: str = "choices", has_events: bool = False) -> dict[str, Any]:
    """The OpenAPI description of a route with a body; `required` is a field of its response."""
    schemas = [body_schema(each, each.get("$defs", {})) for each in (kind.model_json_schema() for kind in kinds)]
    schema = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return described(schema, {"type": "object", "required": [required]}, has_events=has_events or required == "choices")
