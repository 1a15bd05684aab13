"""Features: what the `datasets` library says of Arrow's columns, as the mapping of `Features.to_dict()`, which Parquet
files keep in their metadata. Does not import that library."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from kitforge.foundation.errors import DataError

# By column; empty for columns of Arrow that nothing is said of, None for rows that Arrow does not hold.
Features: TypeAlias = Mapping[str, Any] | None


def schema_features(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """The features that the metadata of an Arrow schema describe."""
    found: Any = {}
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    return found if isinstance(found, dict) else {}


def python_values(array: Any) -> list[Any]:
    """The values of an Arrow array; times outside the years 1 to 9999, which Python lacks, as Arrow writes them."""
    try:
        return list(array.to_pylist())
    except (OverflowError, ValueError):
        return list(array.cast("string").to_pylist())


def python_rows(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table or batch."""
    columns = map(python_values, table.columns)
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def class_names(features: Features, columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The first of the columns that there is, and the names of its numbers: those of a ClassLabel or of lists of it."""
    column = next((name for name in columns if name in (features or {})), "")
    feature = (features or {}).get(column)
    while (inner := _inner(feature)) is not None:
        feature = inner
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return column, ()
    return column, tuple(map(str, feature.get("names") or ()))


def named(value: Any, names: Sequence[str], location: object) -> Any:
    """The names of the numbers of a ClassLabel. A number below zero is that of no class. Raises DataError for one
    beyond the names."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [named(each, names, location) for each in value]
    if not isinstance(value, int) or value < 0:
        return value
    if value >= len(names):
        raise DataError(f"{location} has a label without a name", got=value, expected=f"0 to {len(names) - 1}")
    return names[value]


def with_json(value: Any, feature: Any) -> Any:
    """The value, with what its JSON texts spell in their place."""
    if isinstance(feature, dict) and feature.get("_type") == "Json":
        return json.loads(value) if isinstance(value, str) else value
    if isinstance(value, list) and (inner := _inner(feature)) is not None:
        return [with_json(each, inner) for each in value]
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: with_json(each, feature.get(name)) for name, each in value.items()}
    return value


def without_fills(value: Any, feature: Any = None) -> Any:
    """The value without the nulls that Arrow fills in where other rows have a key, as TRL's `remove_none_values`. What
    a Json feature holds has its own nulls."""
    if isinstance(feature, dict) and feature.get("_type") == "Json":
        return value
    if isinstance(value, (list, tuple)):
        inner = _inner(feature)
        return [without_fills(each, inner) for each in value]
    if not isinstance(value, Mapping):
        return value
    fields = feature if isinstance(feature, dict) else {}
    return {name: without_fills(each, fields.get(name)) for name, each in value.items() if each is not None}


def _inner(feature: Any) -> Any:
    """The feature of the members of a list; None for anything else."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    is_list = isinstance(feature, dict) and feature.get("_type") in ("List", "LargeList", "Sequence")
    return feature["feature"] if is_list else None
