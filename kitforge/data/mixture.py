"""Weighted sources: how `data.train` names a mixture. Which sample comes from which source is decided in `schedule`."""

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kitforge.foundation.errors import ConfigError, DataError, nearest
from kitforge.foundation.files import user_path

_EXAMPLE = "data.train=[{source:a.jsonl,weight:0.7},{source:b.txt,weight:0.3}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource:
    """One source of a mixture."""

    name: str
    source: object  # what data.train may be without a mixture
    weight: float  # relative to the sum of all weights
    options: Mapping[str, Any]  # options of this source that replace those of `data`


def weighted_sources(spec: object, option_names: Collection[str]) -> list[WeightedSource] | None:
    """The sources of a mixture `[{source: ..., weight: ...}, ...]`; None for any other corpus.

    An entry may also hold the options `option_names`. Rows that have a column `source` and no weights, or further
    columns, are no mixture. Raises
    ConfigError for a missing or invalid weight, an unknown key, a nested mixture, and a source that is named twice.
    """
    known = {"source", "weight", *option_names}
    is_list = isinstance(spec, (list, tuple)) and all(isinstance(entry, Mapping) for entry in spec)
    if not is_list or not any({"source", "weight"} <= set(entry) <= known for entry in spec):  # type: ignore[attr-defined]
        return None
    chosen = [_weighted_source(entry, f"data.train[{number}]", known) for number, entry in enumerate(spec)]  # type: ignore[arg-type, var-annotated]
    first: dict[str, int] = {}
    for number, each in enumerate(chosen):
        is_path = isinstance(each.source, (str, os.PathLike))
        identity = str(user_path(each.source).resolve()) if is_path else f"object {id(each.source)}"  # type: ignore[arg-type]
        if isinstance(each.source, (list, tuple)):
            identity = repr(each.source)
        identity += repr(sorted(each.options.items()))
        if identity in first:
            raise ConfigError(
                "the mixture names a source twice",
                got=f"{each.name} as data.train[{first[identity]}] and data.train[{number}]",
                expected="every source once",
                fix="keep one of them, with the sum of both weights",
            )
        first[identity] = number
        if weighted_sources(each.source, option_names) is not None:
            raise ConfigError(
                "a source of a mixture is a mixture", got=each.name, fix="write all sources into one list"
            )
    return chosen


def source_error(name: str, error: DataError) -> DataError:
    """The error about a source that cannot be read, or is empty, with the name of the source."""
    return DataError(f"source {name} of the mixture: {error}")


def _weighted_source(entry: Mapping[str, Any], path: str, known: Collection[str]) -> WeightedSource:
    if unknown := [str(name) for name in entry if name not in known]:
        raise ConfigError(
            f"unknown option {path}.{unknown[0]}", expected=", ".join(sorted(known)), fix=nearest(unknown[0], known)
        )
    for name in ("source", "weight"):
        if entry.get(name) is None:
            raise ConfigError(
                f"{path} has no {name}",
                got=", ".join(f"{key}={str(value)[:40]!r}" for key, value in entry.items()),
                expected="a source and a weight in every entry of a mixture",
                fix=f"{_EXAMPLE}; pass rows with the column 'source' as an iterator: iter(rows)",
            )
    source, weight = entry["source"], entry["weight"]
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight <= 0:
        raise ConfigError(
            f"invalid value for option {path}.weight",
            got=repr(weight),
            expected="a finite number above 0",
            fix="leave the source out of the list to give it no samples" if weight == 0 else None,
        )
    is_named = isinstance(source, (str, os.PathLike, list, tuple)) and len(str(source)) <= 200
    options = {name: value for name, value in entry.items() if name not in ("source", "weight")}
    return WeightedSource(
        name=str(source) if is_named else f"{path} ({type(source).__name__})",
        source=source,
        weight=weight,
        options=options,
    )
