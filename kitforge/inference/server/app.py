"""The OpenAI-compatible routes of the text-generation server. FastAPI is imported when they are made."""

import asyncio
from collections.abc import Callable
from typing import Any

from kitforge.data.optional_imports import import_optional
from kitforge.inference.server.application import (
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
from kitforge.inference.server.service import EncodedPrompt, RequestHandle, Service
from kitforge.inference.server.web_ui import content_security_policy, page, rendered
from kitforge.inference.text_engine import TextDelta


def create_app(service: Service) -> Any:
    """The FastAPI application of a service. Raises DependencyError where FastAPI is not installed."""
    app = new_application(service)
    _add_info_routes(app, service)
    # This module needs pydantic, whose presence `new_application` has checked.
    bodies = import_optional("kitforge.inference.server.requests", needed_for="kitforge serve", extra="serve")
    items = import_optional("kitforge.inference.server.item_requests", needed_for="kitforge serve", extra="serve")
    _add_completion_routes(app, service, bodies, items)
    _add_tokenizer_routes(app, service, bodies)
    return app


def _add_info_routes(app: Any, service: Service) -> None:
    """Models, and the web UI."""
    from fastapi import FastAPI
    from fastapi.responses import HTMLResponse, JSONResponse

    routes: FastAPI = app

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


async def _read(request: Any, service: Service, parse: Callable[[bytes], Any]) -> Any:
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
