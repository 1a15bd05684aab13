"""The routes of the recommender server. FastAPI is imported when they are built."""

# No postponed annotations here: FastAPI reads them, and its names are local to these functions.

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import KitforgeError
from kitforge.inference.server.application import described, new_application, read_body, unless_gone
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.request_body import invalid_value
from kitforge.kits.recommender.server.requests import RowReader, known_fields, whole_number
from kitforge.kits.recommender.server.service import Query, RecommenderService, ScoringReply

_ROWS = ("rows", "columns")


def new_app(service: RecommenderService) -> Any:
    """The FastAPI application of a service. Raises DependencyError if FastAPI is not installed."""
    app = new_application(service)
    if service.row_reader is not None:
        _add_score(app, service, service.row_reader)
    else:
        family = service.version.pipeline.model.config.family
        _add_refusal(app, "/score", f"a {family} scores no rows; ask for items: POST /retrieve")
    if service.user_reader is not None:
        _add_retrieve(app, service, service.user_reader)
    else:
        _add_refusal(app, "/retrieve", "this run scores rows and finds no items; send them to POST /score")
    return app


def _add_refusal(app: Any, path: str, words: str) -> None:
    """Add a route that refuses requests which this family does not support."""
    from fastapi import FastAPI

    routes: FastAPI = app

    @routes.post(path, include_in_schema=False)
    async def refuse() -> None:
        raise ApiError(404, words, code="wrong_route")


def _add_score(app: Any, service: RecommenderService, reader: RowReader) -> None:
    scores = {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}}
    documentation = _described("The probability of a click for each row.", reader.schema(), "scores", scores)
    _add_route(app, service, "score", documentation, lambda body: Query(batch=reader.read(known_fields(body, _ROWS))))


def _add_retrieve(app: Any, service: RecommenderService, reader: RowReader) -> None:
    most, default = service.limits.max_top_k, min(10, service.limits.max_top_k)
    item = {"type": ["integer", "string"]}
    listed = {"type": "array", "items": item}
    number = {"description": "Items for each row.", "type": "integer", "minimum": 1, "maximum": most}
    words = "Items that are not given: for all rows, or a list for each row."
    excluded = {"description": words, "oneOf": [listed, {"type": "array", "items": listed}]}
    properties = {**reader.schema(), "k": number | {"default": default}, "exclude": excluded}
    found = {"type": "object", "properties": {"item": item, "score": {"type": "number"}}}
    items = {"type": "array", "items": {"type": "array", "items": found}}

    def understood(body: bytes) -> Query:
        fields = known_fields(body, (*_ROWS, "k", "exclude"))
        k, batch = whole_number(fields, "k", default, most), reader.read(fields)
        return Query(batch=batch, k=k, excluded=_excluded(fields.get("exclude"), service, len(batch)))

    documentation = _described("The k best items for each row, the best first.", properties, "items", items)
    _add_route(app, service, "retrieve", documentation, understood)


def _add_route(
    app: Any, service: RecommenderService, name: str, documentation: Any, understood: Callable[[bytes], Query]
) -> None:
    """Add a route whose bodies are understood as queries."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    routes: FastAPI = app

    @routes.post(f"/{name}", name=name, **documentation)
    async def answer(request: Request) -> JSONResponse:
        query = await read_body(request, service, understood)
        reply = await _answer(request, service, query)
        kind = "scores" if query.k is None else "items"
        return JSONResponse({"model": service.name, "step": reply.step, kind: reply.rows})


async def _answer(request: Any, service: RecommenderService, query: Query) -> ScoringReply:
    """The reply to a query. Raises ApiError if the queue is full or the model fails."""
    service.check_capacity()
    service.num_active += 1
    try:
        return await unless_gone(request, service.worker.submit(query, len(query.batch)))
    except ApiError as refusal:
        if refusal.code == "client_left":
            service.metrics.cancelled.inc()
        raise
    except KitforgeError as error:
        raise service.api_error(error) from None
    finally:
        service.num_active -= 1


def _excluded(value: Any, service: RecommenderService, num_rows: int) -> NDArray[np.int64] | None:
    """Catalogue indices [B, E] of excluded items. Unknown items are ignored."""
    if value is None or value == []:
        return None
    is_nested = isinstance(value, list) and all(isinstance(each, list) for each in value)
    lists = value if is_nested else [value]
    if is_nested and len(value) != num_rows:
        raise invalid_value(
            "exclude", value, f"a list of items for all rows, or a list for each of the {num_rows} rows"
        )
    most = service.limits.max_top_k
    for each in lists:
        is_list = isinstance(each, list) and all(type(item) in (int, str) for item in each)
        if not is_list or len(each) > most or any(isinstance(item, int) and abs(item) >= 2**63 for item in each):
            raise invalid_value("exclude", each, f"at most {most} items, whole numbers or texts as the data call them")
    try:
        item_indices = [service.version.pipeline.indices_of(each) for each in lists]
    except ValueError:
        raise invalid_value("exclude", value, "whole numbers, as the data call the items") from None
    padded = np.full((len(item_indices), max(map(len, item_indices))), -1, np.int64)
    for row, found in enumerate(item_indices):
        padded[row, : len(found)] = found
    return padded if is_nested else np.repeat(padded, num_rows, axis=0)


def _described(words: str, properties: dict[str, Any], answer: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description of a route with rows."""
    body = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "oneOf": [{"required": [name]} for name in _ROWS],
    }
    reply = {
        "type": "object",
        "required": ["model", "step", answer],
        "properties": {"model": {"type": "string"}, "step": {"type": "integer"}, answer: schema},
    }
    return {"description": words, **described(body, reply)}
