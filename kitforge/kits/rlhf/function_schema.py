"""The JSON schema of a Python function, made of its signature and docstring, as chat templates read `tools`."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from kitforge.foundation.errors import ConfigError

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Return|Raises|Examples?|Yields|Notes?):[ \t]*$", re.MULTILINE
)
# An argument of a docstring in Google's style: `name: words` or `name (type): words`, with lines that go on with it.
_ARGUMENT = re.compile(r"^(\w+)(?: ?\([^)]*\))?:\s*(.*?)(?=^\w+(?: ?\([^)]*\))?:|\Z)", re.MULTILINE | re.DOTALL)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """What `transformers.utils.get_json_schema` makes of a function with type hints and a docstring in Google's style.
    Raises ConfigError where one of them says too little."""
    name = getattr(function, "__name__", type(function).__name__)
    text, arguments, returns = _parse_docstring(inspect.getdoc(function) or "")
    if not text:
        raise ConfigError(f"the tool {name!r} has no docstring", expected="what it does, and an entry of Args: each")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"the tool {name!r} cannot be called by names", got=str(parameter))
        if parameter.name not in hints or parameter.name not in arguments:
            raise ConfigError(
                f"the tool {name!r} says too little of its argument {parameter.name!r}",
                got="no type hint" if parameter.name not in hints else "nothing in the docstring",
                expected=f'a type hint, and "{parameter.name}: what it means" below Args:',
            )
        properties[parameter.name] = _schema(hints[parameter.name], name) | {"description": arguments[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    function_part = {"name": name, "description": text, "parameters": found}
    if "return" in hints:
        function_part["return"] = _schema(hints["return"], name) | ({"description": returns} if returns else {})
    return {"type": "function", "function": function_part}


def schema_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a value from JSON is none of a schema's, in words; None where it is one."""
    if "enum" in schema and value not in schema["enum"]:
        return f"expected one of {schema['enum']}"
    if "anyOf" in schema:
        return (
            None if any(schema_mismatch(value, each) is None for each in schema["anyOf"]) else "expected another type"
        )
    kinds = schema.get("type")
    if kinds is None or (value is None and schema.get("nullable")):
        return None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_of(value, kind) for kind in kinds):
        return f"expected {' or '.join(kinds)}"
    if isinstance(value, list) and "items" in schema:
        return next((each for each in (schema_mismatch(item, schema["items"]) for item in value) if each), None)
    return None


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == {True: "boolean", False: "boolean", None: "null"}[value]
    kinds: dict[str, Any] = {"integer": int, "number": (int, float), "string": str, "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))


def _parse_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    """What the function does, what each argument means, and what it returns."""
    text, *sections = _SECTION.split(doc)
    found = dict(zip(sections[::2], (inspect.cleandoc(each) for each in sections[1::2]), strict=True))
    entries = next((found[each] for each in ("Args", "Arguments", "Parameters") if each in found), "")
    arguments = {each[1]: " ".join(each[2].split()) for each in _ARGUMENT.finditer(entries)}
    returns = found.get("Returns", found.get("Return", ""))
    return text.strip(), arguments, " ".join(returns.split())


def _schema(hint: Any, name: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        kinds = list(dict.fromkeys(_PLAIN[type(each)] for each in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin in (Union, types.UnionType):
        members = [_schema(each, name) for each in args if each is not type(None)]
        if len(members) == 1:
            found = members[0]
        elif all(list(each) == ["type"] for each in members):
            found = {"type": sorted(each["type"] for each in members)}
        else:
            found = {"anyOf": members}
        return found | ({"nullable": True} if type(None) in args else {})
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(args[0], name)} if args else {})
    if hint is dict or origin is dict:
        return {"type": "object"} | ({"additionalProperties": _schema(args[1], name)} if args else {})
    raise ConfigError(
        f"the tool {name!r} has a type that JSON does not have",
        got=str(hint),
        expected="int, float, str, bool, list, dict, Literal, Any, or a union of these",
    )
