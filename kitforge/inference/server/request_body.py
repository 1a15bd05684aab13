"""From the bytes of a body to plain values, and what is said of a value that is wrong. Knows no field and no HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kitforge.inference.server.errors import ApiError

# Letters of anything that is said back to whoever sent it.
MAX_SHOWN_CHARACTERS = 80
# Entries of one object; what is known has fewer fields by far.
_MAX_ENTRIES = 2048
# Objects and lists in one list: messages and prompts are fewer.
_MAX_NESTED = 4096
_MAX_DEPTH = 64


def fields_of(body: bytes) -> dict[str, Any]:
    """The object of JSON that a body holds, without the fields that are null at any depth. Raises ApiError."""
    value: dict[str, Any] = _without_nulls(parse(body))
    return value


def invalid_value(name: str, value: Any, expected: str) -> ApiError:
    """The refusal of one value."""
    return _invalid_value(name, truncate(_shown(value)), expected)


def _invalid_value(name: str, got: str, expected: str) -> ApiError:
    message = f"{name!r} has the wrong value\n  got:      {got}\n  expected: {expected}"
    return ApiError(400, message, parameter=name, code="invalid_value")


def _shown(value: Any) -> str:
    """Enough of a value to know it by; nothing of what is large is written out for that."""
    if isinstance(value, str):
        value = value[:MAX_SHOWN_CHARACTERS]
    elif isinstance(value, (list, dict)) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value)


def truncate(text: str) -> str:
    """As much of a text as is said back to whoever sent it."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def parse(body: bytes) -> Any:
    """The object of JSON that a body holds, as it is. Raises ApiError."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        if b"\\u" in body:
            # A half of a pair of surrogates can be spelt in JSON, and is no text.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise ApiError(400, "the body is not text in UTF-8", code="invalid_encoding") from None
    except (ValueError, RecursionError) as error:
        words = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise ApiError(400, f"the body is not JSON: {truncate(words)}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be an object of JSON", code="invalid_json")
    return value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """A value without the fields that are null. Raises ApiError for more depth, fields or lists than any has."""
    if depth > _MAX_DEPTH:
        raise ApiError(400, f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json")
    if isinstance(value, dict):
        if len(value) > _MAX_ENTRIES:
            raise ApiError(400, f"an object has {len(value)} fields; {_MAX_ENTRIES} are the most", code="too_long")
        return {name: _without_nulls(each, depth + 1) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        if len(value) > _MAX_NESTED and any(isinstance(each, (dict, list)) for each in value):
            message = f"a list holds {len(value)} lists or objects; {_MAX_NESTED} are the most"
            raise ApiError(400, message, code="too_long")
        return [_without_nulls(each, depth + 1) if isinstance(each, (dict, list)) else each for each in value]
    return value


def _few(most: Any) -> str:
    return f"at most {most} of them" if most else "none; they are not done here"


def _as_json(words: str) -> str:
    return words.replace("'", '"').replace("False", "false").replace("True", "true")


# What pydantic finds wrong, in our words.
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "int_type": lambda _: "a whole number",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "finite_number": lambda _: "a number that is not infinite",
    "string_type": lambda _: "text",
    "bool_type": lambda _: "true or false",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "string_too_short": lambda _: "text that is not empty",
    "too_short": lambda context: f"at least {context['min_length']} of them",
    "too_long": lambda context: _few(context.get("count", context.get("max_length"))),
    "literal_error": lambda context: f"{_as_json(context['expected'])}; anything else is not done here",
    "greater_than_equal": lambda context: f"at least {context['ge']:g}",
    "less_than_equal": lambda context: f"at most {context['le']:g}",
    "less_than": lambda context: f"below {context['lt']:g}",
}


def validation_error(error: Mapping[str, Any]) -> ApiError:
    """What is said of an error of pydantic, without more of the request than is needed to find it."""
    kind, context = error["type"], error.get("ctx", {})
    name = _named(error["loc"])
    if kind == "missing":
        return ApiError(400, f"{name!r} is missing", parameter=name, code="missing_parameter")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown parameter {name!r}", parameter=name, code="unknown_parameter")
    expected = _EXPECTED[kind](context) if kind in _EXPECTED else error["msg"]
    got = context.get("got", error["input"])
    if kind in ("too_long", "too_short"):
        size = got if isinstance(got, int) else len(got)
        return _invalid_value(name, f"{size} of them", expected)
    return invalid_value(name, got, expected)


def _named(path: tuple[int | str, ...]) -> str:
    """Where something is, as `messages[1].content`. The names of unions' members are not in the request."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("text", "texts", "tokens", "rows", "parts") or not name:
            name += f".{part}" if name else str(part)
    return truncate(name)
