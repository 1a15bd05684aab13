"""The feature schema (`data.schema`): which columns become which features, and how it is inferred from a table."""

import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from kitforge.data.tables.columns import ColumnLayout, KeyColumn, KeyKind, LabelColumn, ListColumn
from kitforge.data.tables.events import EventColumns
from kitforge.foundation.config import check, check_least, from_dict, to_yaml
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.files import user_path
from kitforge.foundation.untrusted import load_yaml

# hash: into num_buckets, collisions are counted; vocabulary: the values seen in training, by frequency;
# exact: the 64-bit key itself, for growing tables.
Encoding = Literal["hash", "vocabulary", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    """A dense feature: logarithm, then standardization."""

    column: str | None = None  # None: the feature's name
    log: bool = False  # sign(x) log(1 + |x|)
    standardize: bool = True  # by mean and standard deviation of the training rows
    missing: Literal["mean", "zero"] = "mean"  # value of missing cells; zero is set before the logarithm
    indicator: bool = False  # add a second feature: 1 if the value is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFeature:
    """A number discretized into buckets, each an id. Missing values have id 0."""

    column: str | None = None  # None: the feature's name
    # Quantile buckets of the training rows. A value frequent enough to fill a bucket has one of its own.
    num_buckets: int = 10
    edges: tuple[float, ...] | None = None  # ascending; a value on an edge is above it; replaces num_buckets
    dim: int | None = None  # of the embedding; None: the model's

    def __post_init__(self) -> None:
        check_least("data.schema.bucketed", self, 2, "num_buckets")
        rising = self.edges is None or (len(self.edges) > 0 and list(self.edges) == sorted(set(self.edges)))
        check(rising, "data.schema.bucketed.edges", self.edges, "rising numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class IdFeature:
    """A feature of ids. Hash: 0 is missing. Vocabulary: 0 is missing, 1 unknown."""

    column: str | None = None  # None: the feature's name
    kind: KeyKind = "text"
    encoding: Encoding = "hash"
    num_buckets: int = 100_000  # of encoding=hash
    min_count: int = 1  # of encoding=vocabulary: rarer values are unknown
    max_size: int | None = None  # of encoding=vocabulary: keep the most frequent values; None: all
    dim: int | None = None  # of the embedding; None: the model's
    table: str | None = None  # features of one table share ids and rows; None: a table of its own

    def __post_init__(self) -> None:
        check(self.num_buckets >= 2, "data.schema num_buckets", self.num_buckets, "at least 2")
        check(self.min_count >= 1, "data.schema min_count", self.min_count, "at least 1")
        check(self.max_size is None or self.max_size >= 1, "data.schema max_size", self.max_size, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalFeature(IdFeature):
    """One id or category per row."""

    missing: Literal["own", "error"] = "own"  # an id of its own, or a bad row


@dataclass(frozen=True, slots=True, kw_only=True)
class BagFeature(IdFeature):
    """Multi-hot: any number of ids per row, pooled by the model."""

    separator: str = " "  # of a column of text


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFeature(IdFeature):
    """Ids in order of time; the last `max_length` are kept and right-padded with 0."""

    separator: str = " "  # of a column of text
    max_length: int = 50

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check_least("data.schema.sequences", self, 1, "max_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFeature:
    """A feature cross: an id for each combination of values, hashed with the feature names as salt."""

    of: tuple[str, ...]  # two or more categorical or bucketed features
    num_buckets: int = 100_000
    dim: int | None = None

    def __post_init__(self) -> None:
        check(len(self.of) >= 2, "data.schema.crosses.of", self.of, "two or more features")
        check_least("data.schema.crosses", self, 2, "num_buckets")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSchema:
    """The features by name, the label and the group column."""

    # Columns of event rows (user, item, time), which are grouped by user before encoding; None: rows are no events.
    events: EventColumns | None = None
    label: LabelColumn | None = None
    numeric: dict[str, NumericFeature] = field(default_factory=dict)
    bucketed: dict[str, BucketFeature] = field(default_factory=dict)
    categorical: dict[str, CategoricalFeature] = field(default_factory=dict)
    bags: dict[str, BagFeature] = field(default_factory=dict)
    sequences: dict[str, SequenceFeature] = field(default_factory=dict)
    crosses: dict[str, CrossFeature] = field(default_factory=dict)
    group: str | None = None  # the user or session column, for grouped metrics
    group_kind: KeyKind = "text"
    # Of an inferred schema: columns that are not used, and why.
    left_out: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

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

    @property
    def known_columns(self) -> tuple[str, ...]:
        """The columns that are read, and those that are left out on purpose."""
        return (*self.layout().names, *self.left_out)

    def column_of(self, name: str) -> KeyColumn | ListColumn:
        """The column of a categorical feature or a sequence."""
        if name in self.categorical:
            return KeyColumn(name=self.source_column(name), kind=self.categorical[name].kind)
        return _list_column(name, self.sequences[name])

    def source_column(self, name: str) -> str:
        """The column that a feature is read from."""
        parts: tuple[dict[str, Any], ...] = (self.numeric, self.bucketed, self.categorical, self.bags, self.sequences)
        return next(part[name] for part in parts if name in part).column or name

    def layout(self, *, with_label: bool = True) -> ColumnLayout:
        """The columns to read; without the label for inference."""
        keys: dict[str, KeyColumn] = {}
        for name, feature in self.categorical.items():
            _add(keys, feature.column or name, feature.kind, feature.missing == "error")
        if self.group is not None:
            _add(keys, self.group, self.group_kind, True)
        lists: dict[str, ListColumn] = {}
        many: dict[str, BagFeature | SequenceFeature] = {**self.bags, **self.sequences}
        for name, item in many.items():
            column = _list_column(name, item)
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


def schema_summary(schema: FeatureSchema) -> list[str]:
    """What the columns of a schema are, a line for each kind: the label with its positive value, ids and categories,
    numbers, lists, and what is left out."""
    label = schema.label
    lines = []
    if label is not None:
        positive = "1" if label.positive is None else repr(label.positive)
        negative = "0" if label.positive is None else "all other values"
        negative = negative if label.negative is None else repr(label.negative)
        lines.append(f"label: {label.name} (positive: {positive}, negative: {negative})")
    kinds = {"categories": schema.categorical, "numbers": schema.numeric or schema.bucketed, "bags": schema.bags}
    for name, features in {**kinds, "sequences": schema.sequences}.items():
        if features:
            columns = dict.fromkeys(schema.source_column(feature) for feature in features)
            lines.append(f"{name}: {', '.join(columns)}")
    if schema.left_out:
        lines.append("left out: " + ", ".join(f"{name} ({reason})" for name, reason in schema.left_out.items()))
    return lines


def read_schema(spec: object) -> FeatureSchema:
    """The schema of `data.schema`: a mapping, or the path of a YAML file, with or without a top-level `schema:`."""
    if isinstance(spec, FeatureSchema):
        return spec
    values = spec
    if isinstance(spec, (str, os.PathLike)):
        try:
            values = load_yaml(user_path(spec).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            fix = "kitforge inspect FILE proposes a schema"
            raise ConfigError(f"cannot read the schema {spec}", got=error, expected="a YAML file", fix=fix) from None
    if isinstance(values, Mapping) and set(values) == {"schema"}:
        values = values["schema"]
    check(isinstance(values, Mapping), "data.schema", values, "features by their names, or a YAML file")
    assert isinstance(values, Mapping)
    events, features = values.get("events"), [name for name in values if name not in ("events", "label", "group")]
    if isinstance(events, Mapping) and not features and events.get("history") is None and "item" in events:
        # A schema without features has a sequence of the event items.
        values = {**values, "sequences": {events["item"]: {"encoding": "vocabulary"}}}
    return from_dict(FeatureSchema, values, "data.schema")


def schema_yaml(schema: FeatureSchema, *, has_left_out: bool = False) -> str:
    """The schema as YAML, without defaults."""
    return to_yaml({"schema": _non_default(schema if has_left_out else replace(schema, left_out={}))})


def _non_default(config: Any) -> Any:
    if not is_dataclass(config):
        return config
    values: dict[str, Any] = {}
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if isinstance(value, dict):
            # Quoted, so that YAML reads every name as text.
            values |= (
                {field_.name: {json.dumps(name): _non_default(item) for name, item in value.items()}} if value else {}
            )
        elif value != field_.default:
            values[field_.name] = _non_default(value)
    return values


def _list_column(name: str, item: BagFeature | SequenceFeature) -> ListColumn:
    return ListColumn(name=item.column or name, kind=item.kind, separator=item.separator)


def _add(keys: dict[str, KeyColumn], column: str, kind: KeyKind, is_required: bool) -> None:
    present = keys.get(column, KeyColumn(name=column, kind=kind))
    check(present.kind == kind, f"data.schema {column}", f"{present.kind} and {kind}", "one kind")
    keys[column] = KeyColumn(name=column, kind=kind, is_required=present.is_required or is_required)


def with_rare_values(schema: FeatureSchema) -> FeatureSchema:
    """The schema with `min_count=1` for all categorical features."""
    features = {name: replace(feature, min_count=1) for name, feature in schema.categorical.items()}
    return replace(schema, categorical=features)


def with_own_items(schema: FeatureSchema, items: Container[str]) -> FeatureSchema:
    """The schema with vocabulary encoding for these features, so that items do not collide."""
    parts: dict[str, Any] = {"categorical": schema.categorical, "sequences": schema.sequences}
    for part, features in parts.items():
        own = {name: replace(each, encoding="vocabulary") for name, each in features.items() if name in items}
        parts[part] = features | own
    return replace(schema, **parts)
