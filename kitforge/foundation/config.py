"""Strict conversion of plain dicts to frozen dataclasses. Unknown keys, wrong types and ranges raise ConfigError."""

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from kitforge.foundation.errors import ConfigError, nearest

T = TypeVar("T")

# Error messages quote at most this many characters of a wrong value.
_MOST_SHOWN = 100
# Of a field in source text: the comment above it, its name, the comment beside it.
FIELD = re.compile(r"^((?:    # .*\n)*)    (\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)

# Metadata of a field whose value is never recorded, and the text recorded instead.
SECRET = {"secret": True}
MASK = "***"
# Metadata of a field that only Python sets, not a run: no option that anyone names, and not recorded.
INTERNAL = {"internal": True}


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `cls` from `values`; `path` is the dotted prefix of the option names in messages.

    Raises ConfigError for an unknown key (names the nearest one), a missing key, or a value of the wrong type.
    """
    hints = _hints(typing.cast(type, cls))
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            name = str(key)[:_MOST_SHOWN]
            raise ConfigError(f"unknown option {_join(path, name)!r}", fix=nearest(name, fields))
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"option {_join(path, missing[0])!r} has no value", expected=_type_text(hints[missing[0]]))
    return cls(**{key: convert(hints[key], value, _join(path, key)) for key, value in values.items()})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    # Cached: resolving hints takes longer than the rest of the conversion.
    return typing.get_type_hints(cls)


def to_dict(config: Any, *, is_whole: bool = False) -> dict[str, Any]:
    """The plain dict of a dataclass, ready for YAML or JSON (tuples become lists, secrets are masked, and what is no
    option left out, unless `is_whole`)."""
    values, hidden = {}, set() if is_whole else _internal_names(config)
    for field in dataclasses.fields(config):
        if field.name not in hidden:
            value = getattr(config, field.name)
            is_masked = field.metadata.get("secret") and value is not None
            values[field.name] = MASK if is_masked else _plain(value)
    return values


def to_yaml(values: Mapping[str, Any], indent: int = 0) -> str:
    """Nested plain values as YAML: mappings in blocks, everything else as JSON, which YAML contains."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{' ' * indent}{name}:\n{to_yaml(value, indent + 2)}")
        else:
            lines.append(f"{' ' * indent}{name}: {json.dumps(value, ensure_ascii=False, default=str)}\n")
    return "".join(lines)


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` converted to the type `hint`. Raises ConfigError naming the option `path`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise _wrong(path, value, f"one of {', '.join(map(str, args))}", nearest(str(value), map(str, args)))
    if origin in (tuple, list, dict):
        return _convert_container(hint, value, path)
    if not dataclasses.is_dataclass(hint):
        return _convert_plain(hint, value, path)
    if isinstance(value, hint):  # type: ignore[arg-type]
        return value
    check_groups(hint, value, path)
    return from_dict(hint, value, path)  # type: ignore[arg-type]


def check_groups(hint: Any, values: Any, path: str = "") -> None:
    """Raise ConfigError for a group of options, or a mapping, that `values` make a single value."""
    if not isinstance(values, Mapping):
        fix = "write the options of the group below its name, or leave the name out"
        kind = "a group of options" if dataclasses.is_dataclass(hint) else "a mapping of names to values"
        raise _wrong(path, values, kind, fix)
    for name, inner in _hints(hint).items() if dataclasses.is_dataclass(hint) else ():  # type: ignore[arg-type]
        if name in values and (dataclasses.is_dataclass(inner) or typing.get_origin(inner) is dict):
            check_groups(inner, values[name], _join(path, name))


def check(condition: bool, path: str, got: object, expected: str, fix: str | None = None) -> None:
    """Raise ConfigError for the option `path` unless `condition` holds. Used by `__post_init__` of options."""
    if not condition:
        raise ConfigError(f"invalid value for option {path!r}", got=got, expected=expected, fix=fix)


def check_counts(path: str, values: Mapping[str, int | None], largest: int = 2**31 - 1) -> None:
    """Raise ConfigError for the first option below `path` that is neither None nor in 1 .. `largest`."""
    for name, value in values.items():
        check(value is None or 1 <= value <= largest, f"{path}.{name}", value, f"a whole number from 1 to {largest}")


def check_least(path: str, options: object, least: int, *names: str) -> None:
    """Raise ConfigError for the first of these fields of `options` that is neither None nor `least` or more."""
    for name in names:
        value = getattr(options, name)
        check(value is None or value >= least, f"{path}.{name}", value, f"a whole number of at least {least}")


def check_choice(path: str, name: str, known: Any) -> None:
    """Raise ConfigError unless `name` is one of the values of the Literal `known`."""
    names = typing.get_args(known)
    fix = None if name in names else nearest(str(name), names)
    check(name in names, path, name, f"one of {', '.join(names)}", fix)


def _convert_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in args:
        return None
    members = [arg for arg in args if arg is not type(None)]
    for member in members:
        try:
            return convert(member, value, path)
        except ConfigError:
            if len(members) == 1:
                raise
    raise _wrong(path, value, " or ".join(_type_text(member) for member in members))


def _convert_container(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        check_groups(hint, value, path)
        return {str(key): convert(args[1], item, f"{path}.{key}") for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        raise _wrong(path, value, "a list, for example [1,2]")
    return origin(convert(args[0], item, f"{path}[{index}]") for index, item in enumerate(value))


def _convert_plain(hint: Any, value: Any, path: str) -> Any:
    if hint is Any:
        return value
    if hint is float:
        return _number(value, path)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    # A bool is an int in Python, but `batch_size=true` is a mistake.
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise _wrong(path, value, _type_text(hint))


def _number(value: Any, path: str) -> float:
    """A float, also from text: YAML 1.1 reads 1e-3 as text."""
    if isinstance(value, bool):
        raise _wrong(path, value, "a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _wrong(path, value, "a number") from None


def _wrong(path: str, value: Any, expected: str, fix: str | None = None) -> ConfigError:
    """The error for a value of the wrong type. Long values are truncated."""
    text = repr(value[:_MOST_SHOWN] if isinstance(value, (str, bytes)) else value)
    got = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return ConfigError(f"invalid value for option {path!r}", got=got, expected=expected, fix=fix)


def _type_text(hint: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    if hint in plain:
        return plain[hint]
    args = [arg for arg in typing.get_args(hint) if arg not in (type(None), ...)]
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, args))
    if typing.get_origin(hint) in (list, tuple):
        return f"[{_type_text(args[0])}, ...]"
    return " or ".join(map(_type_text, args)) if args else getattr(hint, "__name__", str(hint))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def option_names(options: type[Any], path: str = "") -> dict[str, Any]:
    """All options by dotted name, with their types."""
    result: dict[str, Any] = {}
    internal = _internal_names(options)
    for name, hint in _hints(typing.cast(type, options)).items():
        if name in internal:
            continue
        if dataclasses.is_dataclass(hint):
            result |= option_names(hint, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            result[path + name] = hint
    return result


def option_help(options: type[Any], path: str = "") -> dict[str, str]:
    """The help text of each option by dotted name: the comment at its field."""
    result: dict[str, str] = {}
    internal = _internal_names(options)
    for owner in reversed(options.__mro__[:-1]):
        source = inspect.getsource(owner)
        for above, name, trailing in FIELD.findall(source):
            if name not in internal:
                result[path + name] = trailing or " ".join(above.replace("#", " ").split())
    for name, hint in _hints(typing.cast(type, options)).items():
        if dataclasses.is_dataclass(hint):
            result |= option_help(hint, f"{path}{name}.")  # type: ignore[arg-type]
    return result


def _internal_names(options: Any) -> set[str]:
    fields = dataclasses.fields(options)
    # A subclass takes an option away by init=False.
    return {field.name for field in fields if field.metadata.get("internal") or not field.init}
