"""The feature schema (`data.schema`): which columns become which features, and how it is inferred from a table."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from kitforge.data.tables.columns import ColumnLayout, KeyColumn, KeyKind, LabelColumn, ListColumn
from kitforge.data.tables.events import EventColumns
from kitforge.foundation.config import check, from_dict, to_yaml
from kitforge.foundation.errors import ConfigError, DataError, nearest
from kitforge.foundation.untrusted import load_yaml

ColumnType = Literal["number", "integer", "text", "list", "nothing"]
_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "income")
# Integer columns with at most this many distinct values are categorical.
_FEW_VALUES = 20
# Names of id columns, whatever their values.
_ID_NAME = re.compile(r"(^|_)(id|ids|user|item)$", re.IGNORECASE)
_NUMBERED_NAME = re.compile(r"^C\d+$", re.IGNORECASE)  # a category of a log without names
_TIME_NAME = re.compile(r"history|sequence|items|clicked", re.IGNORECASE)
# Names of event columns, without RecBole's type suffix (user_id:token).
_USERS = ("user_id", "userid", "user", "uid", "customer_id", "visitor_id", "visitorid", "session_id", "sessionid")
_ITEMS = ("item_id", "itemid", "item", "iid", "movie_id", "movieid", "product_id", "productid", "parent_asin", "asin")
_TIMES = ("timestamp", "time", "ts", "datetime", "event_time", "date", "created_at")
_VOCABULARY = 1000
_MIN_COUNT = 2
_MAX_BUCKETS = 2**20
# Numbers enter as values and as buckets, which express non-monotonic effects and single values early in training.
_RANGES = 32
# hash: into num_buckets, collisions are counted; vocabulary: the values seen in training, by frequency;
# exact: the 64-bit key itself, for growing tables.
Encoding = Literal["hash", "vocabulary", "exact"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFeature:
    """A dense feature: logarithm, then standardization."""

    column: str | None = None  # None: the feature's name
    log: bool = False  # sign(x) log(1 + |x|)
    standardize: bool = True  # by mean and standard deviation of the training rows
    missing: Literal["mean", "zero"] = "mean"  # value of missing cells; zero is set before the logarithm
    indicator: bool = False  # add a second feature: 1 if the value is missing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFeature:
    """A number discretized into buckets, each an id. Missing values have id 0."""

    column: str | None = None  # None: the feature's name
    # Quantile buckets of the training rows. A value frequent enough to fill a bucket has one of its own.
    num_buckets: int = 10
    edges: tuple[float, ...] | None = None  # ascending; a value on an edge is above it; replaces num_buckets
    dim: int | None = None  # of the embedding; None: the model's

    def __post_init__(self) -> None:
        check(self.num_buckets >= 2, "data.schema.bucketed.num_buckets", self.num_buckets, "at least 2")
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalFeature(IdFeature):
    """One id or category per row."""

    missing: Literal["own", "error"] = "own"  # an id of its own, or a bad row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BagFeature(IdFeature):
    """Multi-hot: any number of ids per row, pooled by the model."""

    separator: str = " "  # of a column of text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFeature(IdFeature):
    """Ids in order of time; the last `max_length` are kept and right-padded with 0."""

    separator: str = " "  # of a column of text
    max_length: int = 50

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check(self.max_length >= 1, "data.schema.sequences.max_length", self.max_length, "at least 1")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFeature:
    """A feature cross: an id for each combination of values, hashed with the feature names as salt."""

    of: tuple[str, ...]  # two or more categorical or bucketed features
    num_buckets: int = 100_000
    dim: int | None = None

    def __post_init__(self) -> None:
        check(len(self.of) >= 2, "data.schema.crosses.of", self.of, "two or more features")
        check(self.num_buckets >= 2, "data.schema.crosses.num_buckets", self.num_buckets, "at least 2")


@final
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
        """The column of a categorical feature or a sequence."""
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
        """The columns to read; without the label for inference."""
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
    """The schema of `data.schema`: a mapping, or the path of a YAML file, with or without a top-level `schema:`."""
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
    """With a sequence of the event items, if the schema names no features."""
    events, features = values.get("events"), [name for name in values if name not in ("events", "label", "group")]
    if not isinstance(events, Mapping) or features or events.get("history") is not None or "item" not in events:
        return values
    return {**values, "sequences": {events["item"]: {"encoding": "vocabulary"}}}


def schema_yaml(schema: FeatureSchema) -> str:
    """The schema as YAML, without defaults."""
    return to_yaml({"schema": _non_default(schema)})


def _non_default(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field_ in fields(config):
        value = getattr(config, field_.name)
        if is_dataclass(value):
            values[field_.name] = _non_default(value)
        elif isinstance(value, dict):
            # Quoted, so that YAML reads every name as text.
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnView:
    """Statistics of a column."""

    name: str
    type: ColumnType
    stored: str  # the Arrow type
    num_values: int  # distinct ones
    num_missing: int
    smallest: float | None = None  # of numbers
    largest: float | None = None
    median: float | None = None
    common: tuple[tuple[str, int], ...] = ()  # the most frequent values, with their counts
    # Numeric columns: the few other texts with their counts. Only data.missing_values makes them missing values.
    no_numbers: tuple[tuple[str, int], ...] = ()


def infer_label(columns: Sequence[ColumnView]) -> LabelColumn | None:
    """The label column: it has two values, and a known name or the first or last position. None if there is none."""
    two = [view for view in columns if view.num_values == 2 and view.num_missing == 0 and view.type != "list"]
    named = [view for view in two if view.name.lower() in _LABELS]
    ends = [view for view in two if view in (columns[0], columns[-1])]
    for view in (*named, *ends):
        values = sorted(value for value, _ in view.common)
        if values in (["0", "1"], ["False", "True"]):
            return LabelColumn(name=view.name)
        if values == ["-1", "1"] and view.type == "integer":
            return LabelColumn(name=view.name, positive="1", negative="-1")
        if view.type == "text":
            # The rarer value is the positive one.
            (negative, _), (positive, _) = view.common[:2]
            return LabelColumn(name=view.name, positive=positive, negative=negative)
    return None


def why_no_label(columns: Sequence[ColumnView], num_rows: int) -> str:
    """Why no column is the label."""
    named = [view for view in columns if view.name.lower() in _LABELS]
    for view in named or [columns[0], columns[-1]]:
        values = ", ".join(value for value, _ in view.common)
        if view.type != "list" and view.num_missing and view.num_values <= 2:
            return f"{view.name!r} has no value in {view.num_missing:,} of {num_rows:,} rows"
        if named and view.num_values == 1:
            return f"{view.name!r} is {values} in every row"
        if named:
            return f"{view.name!r} holds {view.num_values:,} different values ({values}...), a label has two: 0 and 1"
    two = [view.name for view in columns if view.num_values == 2 and view.num_missing == 0 and view.type != "list"]
    reason = f"of those with two values ({', '.join(two)}) none is first or last" if two else "none has two values"
    return f"no column is called {', '.join(_LABELS)}, and {reason}"


def infer_schema(
    columns: Sequence[ColumnView], label: LabelColumn | None, num_rows: int, *, is_complete: bool
) -> tuple[FeatureSchema, dict[str, str]]:
    """Features for the useful columns, and the reasons why others are left out."""
    names = {view.name for view in columns}
    numeric: dict[str, NumericFeature] = {}
    bucketed: dict[str, BucketFeature] = {}
    categorical: dict[str, CategoricalFeature] = {}
    bags: dict[str, BagFeature] = {}
    sequences: dict[str, SequenceFeature] = {}
    left_out: dict[str, str] = {}
    for view in columns:
        reason = _useless(view, label, num_rows)
        if reason is not None:
            left_out[view.name] = reason
        elif view.type == "list" and _TIME_NAME.search(view.name):
            sequences[view.name] = SequenceFeature(**_ids(view))
        elif view.type == "list":
            bags[view.name] = BagFeature(**_ids(view))
        elif _is_quantity(view):
            numeric[view.name] = NumericFeature(log=_is_skewed(view))
            bucketed[_unused(f"{view.name}_range", names)] = BucketFeature(column=view.name, num_buckets=_RANGES)
        else:
            categorical[view.name] = CategoricalFeature(**_categories(view, is_complete=is_complete))
    if label is not None:
        del left_out[label.name]
    if not (numeric or categorical or bags or sequences):
        raise DataError("no column of the table can be a feature", got=", ".join(left_out), fix="write data.schema")
    schema = FeatureSchema(
        label=label, numeric=numeric, bucketed=bucketed, categorical=categorical, bags=bags, sequences=sequences
    )
    return schema, left_out


def infer_event_schema(columns: Sequence[ColumnView]) -> FeatureSchema | None:
    """Events as one sequence of items per user, if column names identify user, item and time."""
    matched = _events(columns)
    if matched is None:
        return None
    events, _, item = matched
    name, column = _feature_name(item)
    return FeatureSchema(
        events=events, sequences={name: SequenceFeature(column=column, kind=_kind(item), encoding="vocabulary")}
    )


def guess_targets(columns: Sequence[ColumnView]) -> FeatureSchema | None:
    """Events as rows with user, item and history, if column names identify user, item and time."""
    found = _events(columns)
    if found is None:
        return None
    events, user, item = found
    (user_name, user_column), (item_name, item_column) = _feature_name(user), _feature_name(item)
    history = _unused("history", {view.name for view in columns})
    ids: dict[str, Any] = {"kind": _kind(item), "encoding": "vocabulary", "table": "items"}
    return FeatureSchema(
        events=replace(events, history=history),
        categorical={
            user_name: CategoricalFeature(column=user_column, **_ids(user)),
            item_name: CategoricalFeature(column=item_column, **ids),
        },
        sequences={history: SequenceFeature(**ids)},
        group=user.name,
        group_kind=_kind(user),
    )


def _events(columns: Sequence[ColumnView]) -> tuple[EventColumns, ColumnView, ColumnView] | None:
    """The event columns, and the views of user and item; None if names do not identify them."""
    by_name = {view.name.lower().partition(":")[0]: view for view in columns if view.type != "list"}
    found = [next((by_name[name] for name in names if name in by_name), None) for names in (_USERS, _ITEMS, _TIMES)]
    user, item, time = found
    if user is None or item is None or time is None:
        return None
    return EventColumns(user=user.name, item=item.name, time=time.name), user, item


def _feature_name(view: ColumnView) -> tuple[str, str | None]:
    """The name of a feature, and its column if that differs."""
    return view.name.partition(":")[0], view.name if ":" in view.name else None


def with_length(schema: FeatureSchema, length: int) -> FeatureSchema:
    """The schema with another `max_length` of all sequences."""
    return replace(
        schema, sequences={name: replace(each, max_length=length) for name, each in schema.sequences.items()}
    )


def with_rare_values(schema: FeatureSchema) -> FeatureSchema:
    """The schema with `min_count=1` for all categorical features."""
    features = {name: replace(feature, min_count=1) for name, feature in schema.categorical.items()}
    return replace(schema, categorical=features)


def with_own_items(schema: FeatureSchema, items: Container[str]) -> FeatureSchema:
    """The schema with vocabulary encoding for these features, so that items do not collide."""
    return replace(
        schema,
        categorical={
            name: replace(feature, encoding="vocabulary") if name in items else feature
            for name, feature in schema.categorical.items()
        },
        sequences={
            name: replace(feature, encoding="vocabulary") if name in items else feature
            for name, feature in schema.sequences.items()
        },
    )


def _useless(view: ColumnView, label: LabelColumn | None, num_rows: int) -> str | None:
    if label is not None and view.name == label.name:
        return "the label"
    if view.num_values <= 1 and view.num_missing == 0:
        return "always the same"
    if view.type == "nothing":
        return "no values"
    if view.type in ("text", "integer") and view.num_values == num_rows > _FEW_VALUES and not _is_quantity(view):
        return "a different value in every row"
    return None


def _unused(name: str, names: Container[str]) -> str:
    return name if name not in names else _unused(f"{name}_", names)


def _is_quantity(view: ColumnView) -> bool:
    if view.type == "number":
        return True
    is_name = _ID_NAME.search(view.name) or _NUMBERED_NAME.search(view.name)
    return view.type == "integer" and view.num_values > _FEW_VALUES and not is_name


def _is_skewed(view: ColumnView) -> bool:
    """Whether to take the logarithm: values over several magnitudes, hardly any negative."""
    assert view.median is not None and view.largest is not None and view.smallest is not None
    return view.largest > 20 * max(view.median, 1.0) and view.smallest > -10


def _categories(view: ColumnView, *, is_complete: bool) -> dict[str, Any]:
    """The encoding of a category. Rare values of non-id columns share the unknown id, since they are mostly noise."""
    if _ID_NAME.search(view.name) or not (is_complete or view.num_values <= _VOCABULARY):
        return _ids(view)
    return {"kind": _kind(view), "encoding": "vocabulary", "min_count": _MIN_COUNT}


def _kind(view: ColumnView) -> KeyKind:
    # Text columns stay text: a number in them may exceed 64 bits.
    return "integer" if "int" in view.stored else "text"


def _ids(view: ColumnView) -> dict[str, Any]:
    """Encoding of ids: a vocabulary for few values, hashing for many."""
    kind = _kind(view)
    if view.num_values <= _VOCABULARY:
        return {"kind": kind, "encoding": "vocabulary"}
    buckets = 2 ** (4 * view.num_values - 1).bit_length()
    return {"kind": kind, "encoding": "hash", "num_buckets": min(buckets, _MAX_BUCKETS)}
