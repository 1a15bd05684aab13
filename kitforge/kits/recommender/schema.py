"""Which columns of a table become which features. Plain data: YAML in `data.schema`, or guessed by `inspect`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, final

from kitforge.data.tables.columns import ColumnLayout, KeyColumn, KeyKind, LabelColumn, ListColumn
from kitforge.data.tables.events import EventColumns
from kitforge.foundation.config import check, from_dict, to_yaml
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.untrusted import load_yaml

# hash: so many buckets, collisions counted; vocabulary: the values seen in training, by frequency;
# exact: the 64-bit key itself, for tables that grow.
Encoding = Literal["hash", "vocabulary", "exact"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    """A number of the dense input. The order is: logarithm, mean and deviation, what is missing."""

    column: str | None = None  # None: the feature's name
    log: bool = False  # sign(x) log(1 + |x|)
    standardize: bool = True  # by mean and deviation of the training rows
    missing: Literal["mean", "zero"] = "mean"  # what stands for a missing value; zero is taken before the logarithm
    indicator: bool = False  # a second number, 1 where the value is missing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFeature:
    """A number cut into ranges, each an id. 0 is for what is missing."""

    column: str | None = None  # None: the feature's name
    # Of equal frequency in the training rows, where values do not repeat. One that does so often that it fills a range
    # has it to itself.
    num_buckets: int = 10
    edges: tuple[float, ...] | None = None  # rising; a value on an edge belongs above it; replaces num_buckets
    dim: int | None = None  # of the embedding; None: the model's

    def __post_init__(self) -> None:
        check(self.num_buckets >= 2, "data.schema.bucketed.num_buckets", self.num_buckets, "at least 2")
        rising = self.edges is None or (len(self.edges) > 0 and list(self.edges) == sorted(set(self.edges)))
        check(rising, "data.schema.bucketed.edges", self.edges, "rising numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdFeature:
    """How values become ids. Hash: 0 is for what is missing. Vocabulary: 0 missing, 1 unknown."""

    column: str | None = None  # None: the feature's name
    kind: KeyKind = "text"
    encoding: Encoding = "hash"
    num_buckets: int = 100_000  # of encoding=hash
    min_count: int = 1  # of encoding=vocabulary: values seen less often in training are unknown
    max_size: int | None = None  # of encoding=vocabulary: so many of the most frequent; None: all
    dim: int | None = None  # of the embedding; None: the model's
    table: str | None = None  # features of one table share ids and rows; None: one of its own

    def __post_init__(self) -> None:
        check(self.num_buckets >= 2, "data.schema num_buckets", self.num_buckets, "at least 2")
        check(self.min_count >= 1, "data.schema min_count", self.min_count, "at least 1")
        check(self.max_size is None or self.max_size >= 1, "data.schema max_size", self.max_size, "at least 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalFeature(IdFeature):
    """An id or a category a row."""

    missing: Literal["own", "error"] = "own"  # an id of its own, or a bad row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BagFeature(IdFeature):
    """Any number of ids a row, pooled by the model (multi-hot)."""

    separator: str = " "  # of a column of text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFeature(IdFeature):
    """Ids in order of time; the last `max_length` are kept, padded behind with 0 (the lengths tell)."""

    separator: str = " "  # of a column of text
    max_length: int = 50

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check(self.max_length >= 1, "data.schema.sequences.max_length", self.max_length, "at least 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFeature:
    """An id for each combination of other features' values, hashed with the names of the features as salt."""

    of: tuple[str, ...]  # two or more categorical or bucketed features
    num_buckets: int = 100_000
    dim: int | None = None

    def __post_init__(self) -> None:
        check(len(self.of) >= 2, "data.schema.crosses.of", self.of, "two or more features")
        check(self.num_buckets >= 2, "data.schema.crosses.num_buckets", self.num_buckets, "at least 2")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSchema:
    """Every feature by its name, the label and the group key."""

    # Rows of events (user, item, time), put together by user before features are read; None: rows are as they are.
    events: EventColumns | None = None
    label: LabelColumn | None = None
    numeric: dict[str, NumericFeature] = field(default_factory=dict)
    bucketed: dict[str, BucketFeature] = field(default_factory=dict)
    categorical: dict[str, CategoricalFeature] = field(default_factory=dict)
    bags: dict[str, BagFeature] = field(default_factory=dict)
    sequences: dict[str, SequenceFeature] = field(default_factory=dict)
    crosses: dict[str, CrossFeature] = field(default_factory=dict)
    group: str | None = None  # the column whose value tells a user or a session apart, for grouped metrics
    group_kind: KeyKind = "text"

    def __post_init__(self) -> None:
        names = [*self.numeric, *self.bucketed, *self.categorical, *self.bags, *self.sequences, *self.crosses]
        twice = sorted({name for name in names if names.count(name) > 1})
        check(not twice, "data.schema", ", ".join(twice), "a name for one feature only", "give one of them column=")
        check(bool(names), "data.schema", "no features", "at least one")
        crossable = [*self.bucketed, *self.categorical]
        for name, cross in self.crosses.items():
            unknown = [part for part in cross.of if part not in crossable]
            fix = nearest(unknown[0], crossable) if unknown and crossable else None
            check(not unknown, f"data.schema.crosses.{name}.of", unknown, "categorical or bucketed features", fix)
        self.layout()

    def column_of(self, name: str) -> KeyColumn | ListColumn:
        """How the column of a categorical feature or a sequence is read."""
        if name in self.categorical:
            return KeyColumn(name=self.categorical[name].column or name, kind=self.categorical[name].kind)
        item = self.sequences[name]
        return ListColumn(name=item.column or name, kind=item.kind, separator=item.separator)

    def source_column(self, name: str) -> str:
        """The column that a feature is read from."""
        features: dict[str, Any] = {
            **self.numeric,
            **self.bucketed,
            **self.categorical,
            **self.bags,
            **self.sequences,
        }
        return features[name].column or name

    def layout(self, *, with_label: bool = True) -> ColumnLayout:
        """What has to be read of a table; without the label where rows are only scored."""
        keys: dict[str, KeyColumn] = {}
        for name, feature in self.categorical.items():
            _add(keys, feature.column or name, feature.kind, feature.missing == "error")
        if self.group is not None:
            _add(keys, self.group, self.group_kind, True)
        lists: dict[str, ListColumn] = {}
        many: dict[str, BagFeature | SequenceFeature] = {**self.bags, **self.sequences}
        for name, item in many.items():
            column = ListColumn(name=item.column or name, kind=item.kind, separator=item.separator)
            same = lists.setdefault(column.name, column) == column
            check(same, f"data.schema {column.name}", "two ways to read it", "one kind and one separator")
        numeric: dict[str, NumericFeature | BucketFeature] = {**self.numeric, **self.bucketed}
        numbers = [number.column or name for name, number in numeric.items()]
        return ColumnLayout(
            numbers=tuple(dict.fromkeys(numbers)),
            keys=tuple(keys.values()),
            lists=tuple(lists.values()),
            label=self.label if with_label else None,
        )


def read_schema(spec: object) -> FeatureSchema:
    """The schema of `data.schema`: a mapping, or the path of a YAML file, with or without `schema:` at its head."""
    if isinstance(spec, FeatureSchema):
        return spec
    values = spec
    if isinstance(spec, (str, os.PathLike)):
        try:
            values = load_yaml(Path(spec).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            fix = "kitforge inspect FILE proposes a schema"
            raise ConfigError(f"cannot read the schema {spec}", got=error, expected="a YAML file", fix=fix) from None
    if isinstance(values, Mapping) and set(values) == {"schema"}:
        values = values["schema"]
    check(isinstance(values, Mapping), "data.schema", values, "features by their names, or a YAML file")
    assert isinstance(values, Mapping)
    return from_dict(FeatureSchema, _with_items(values), "data.schema")


def _with_items(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the items of events as a sequence, where nothing else is said of them."""
    events, features = values.get("events"), [name for name in values if name not in ("events", "label", "group")]
    if not isinstance(events, Mapping) or features or events.get("history") is not None or "item" not in events:
        return values
    return {**values, "sequences": {events["item"]: {"encoding": "vocabulary"}}}


def schema_yaml(schema: FeatureSchema) -> str:
    """The schema as it may stand in a file, without what is as it would be anyway."""
    return to_yaml({"schema": _non_default(schema)})


def _non_default(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if is_dataclass(value):
            values[field_.name] = _non_default(value)
        elif isinstance(value, dict):
            # A name in quotes is never taken for a number, a truth or a list.
            values |= (
                {field_.name: {json.dumps(name): _non_default(item) for name, item in value.items()}} if value else {}
            )
        elif value != field_.default:
            values[field_.name] = value
    return values


def _add(keys: dict[str, KeyColumn], column: str, kind: KeyKind, is_required: bool) -> None:
    present = keys.get(column, KeyColumn(name=column, kind=kind))
    check(present.kind == kind, f"data.schema {column}", f"{present.kind} and {kind}", "one kind")
    keys[column] = KeyColumn(name=column, kind=kind, is_required=present.is_required or is_required)
