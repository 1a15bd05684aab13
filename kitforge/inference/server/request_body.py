"""Parses JSON bodies with limits, and turns validation errors into API errors."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.inference.server.errors import ApiError, refused

# Characters of a value that an error message repeats.
MAX_SHOWN_CHARACTERS = 80
# Fields of one object.
_MAX_ENTRIES = 2048
# Objects and lists within one list.
_MAX_NESTED = 4096
_MAX_DEPTH = 64
_DATA = {"const", "default", "enum", "examples", "arguments"}  # of schemas and calls, in which null is a value


def fields_of(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, without fields that are null, at any depth but within data. Raises ApiError."""
    value: dict[str, Any] = _without_nulls(parse_body(body))
    return value


def invalid_value(name: str, value: Any, expected: str, size: int | None = None, fix: str | None = None) -> ApiError:
    """The error of an invalid value; `size` replaces a value of the wrong length in the message."""
    if size is not None:
        got = f"a length of {size}"
    elif isinstance(value, (list, dict)) and len(value) > 8:
        got = f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    else:
        got = truncate(repr(value[:MAX_SHOWN_CHARACTERS] if isinstance(value, str) else value))
    return refused(name, f"{name!r} has an invalid value", got=got, expected=expected, fix=fix)


def truncate(text: str) -> str:
    """The beginning of a text, for an error message."""
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


def parse_body(body: bytes) -> Any:
    """The JSON object of a body. Raises ApiError."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
        if b"\\u" in body:
            # JSON can spell a lone surrogate, which is not valid text.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise ApiError(400, "the body is not UTF-8", code="invalid_encoding") from None
    except (ValueError, RecursionError) as error:
        words = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise ApiError(400, f"the body is not JSON: {truncate(words)}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _without_nulls(value: Any, depth: int = 0, *, is_data: bool = False) -> Any:
    """The value without null fields, unless it is data. Raises ApiError for too much nesting or too many entries."""
    if depth > _MAX_DEPTH:
        raise ApiError(400, f"the body is nested deeper than {_MAX_DEPTH} levels", code="invalid_json")
    if isinstance(value, dict):
        if len(value) > _MAX_ENTRIES:
            raise ApiError(400, f"an object has {len(value)} fields; at most {_MAX_ENTRIES} may be", code="too_long")
        data = {name for name in value if is_data or name in _DATA}
        kept = {name: each for name, each in value.items() if each is not None or name in data}
        return {name: _without_nulls(each, depth + 1, is_data=name in data) for name, each in kept.items()}
    if isinstance(value, list):
        if len(value) > _MAX_NESTED and any(isinstance(each, (dict, list)) for each in value):
            message = f"a list holds {len(value)} lists or objects; at most {_MAX_NESTED} may be"
            raise ApiError(400, message, code="too_long")
        below = partial(_without_nulls, depth=depth + 1, is_data=is_data)
        return [below(each) if isinstance(each, (dict, list)) else each for each in value]
    return value


# What pydantic's usual errors expect, in our words; others keep pydantic's.
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a number that is not infinite",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "string_too_short": "text that is not empty",
    "too_short": "a length of at least {min_length}",
    "too_long": "a length of at most {max_length}",
    "literal_error": "{expected}; nothing else is supported",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
}


def validation_error(error: Mapping[str, Any], hints: Mapping[str, str]) -> ApiError:
    """The API error of a pydantic error, with the hint of its field. It repeats little of the request."""
    kind, context, name = error["type"], error.get("ctx", {}), _named(error["loc"])
    if kind == "missing":
        return refused(name, f"{name!r} is missing", "missing_parameter")
    if kind == "extra_forbidden":
        return refused(name, f"unknown parameter {name!r}", "unknown_parameter")
    expected = error["msg"]
    if kind in _EXPECTED:
        # As JSON writes values: true for True, double quotes.
        expected = _EXPECTED[kind].format(**context).lower().replace("'", '"')
    got = error["input"]
    size = len(got) if kind in ("too_long", "too_short") else None
    return invalid_value(name, got, expected, size, hints.get(name))


def _named(path: tuple[int | str, ...]) -> str:
    """A path as `messages[1].content`, without the tags of union members."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("text", "texts", "tokens", "rows", "parts", "named", "allowed") or not name:
            name += f".{part}" if name else str(part)
    return truncate(name)
