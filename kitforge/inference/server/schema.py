"""The server's description of itself: the bodies that it takes as JSON Schema, and the token that it may ask for."""

from __future__ import annotations

from typing import Any


def body_schema(*kinds: Any) -> dict[str, Any]:
    """The schema of a body that is one of these models of pydantic, with nothing left to be looked up."""
    schemas = [_inlined(schema, schema.get("$defs", {})) for schema in (kind.model_json_schema() for kind in kinds)]
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def set_openapi(app: Any) -> None:
    """Have a FastAPI application say what every route of it asks for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = type(app).openapi(app)
            made.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            # A server for this machine alone asks for none.
            made["security"] = [{"token": []}, {}]
        result: dict[str, Any] = app.openapi_schema
        return result

    app.openapi = openapi


def _inlined(schema: Any, named: dict[str, Any]) -> Any:
    """A schema with what it refers to in its place, without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_inlined(each, named) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(named[schema["$ref"].rpartition("/")[2]], named)
    result = {}
    for name, each in schema.items():
        if name == "properties":
            result[name] = {field: _inlined(value, named) for field, value in each.items()}
        elif name not in ("$defs", "title"):
            result[name] = _inlined(each, named)
    return result
