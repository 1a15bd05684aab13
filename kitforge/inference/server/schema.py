"""The dataclasses of requests as JSON Schema, for the server's description of itself."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

from kitforge.inference.server.asked import RANGES

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


def schema_of(hint: Any) -> dict[str, Any]:
    """The schema of a type that a field of a request may have."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(arg) for arg in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": schema_of(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    return dict(_PLAIN[hint])


def _object(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    properties = {name: _ranged(name, schema_of(hints[name])) for name in fields}
    required = [name for name, each in fields.items() if each.default is dataclasses.MISSING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _ranged(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    if name not in RANGES:
        return schema
    low, high = RANGES[name]
    for option in schema["anyOf"]:
        if option["type"] in ("integer", "number"):
            option |= {"minimum": low, "maximum": high}
    return schema
