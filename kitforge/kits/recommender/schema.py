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
# Whole numbers with no more different values than this are rather categories than quantities.
_FEW_VALUES = 20
# A column of names or numbers of things, whatever its values look like.
_ID_NAME = re.compile(r"(^|_)(id|ids|user|item)$", re.IGNORECASE)
_NUMBERED_NAME = re.compile(r"^C\d+$", re.IGNORECASE)  # a category of a log without names
_TIME_NAME = re.compile(r"history|sequence|items|clicked", re.IGNORECASE)
# What columns of events are called, without the type that RecBole writes behind a name (user_id:token).
_USERS = ("user_id", "userid", "user", "uid", "customer_id", "visitor_id", "visitorid", "session_id", "sessionid")
_ITEMS = ("item_id", "itemid", "item", "iid", "movie_id", "movieid", "product_id", "productid", "parent_asin", "asin")
_TIMES = ("timestamp", "time", "ts", "datetime", "event_time", "date", "created_at")
_VOCABULARY = 1000
_MIN_COUNT = 2
_MAX_BUCKETS = 2**20
# Numbers enter as they are and as ranges, which say at once what a tower learns late: rises that turn, lone values.
_RANGES = 32
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnView:
    """What is known of a column."""

    name: str
    type: ColumnType
    stored: str  # the Arrow type
    num_values: int  # distinct ones
    num_missing: int
    smallest: float | None = None  # of numbers
    largest: float | None = None
    median: float | None = None
    common: tuple[tuple[str, int], ...] = ()  # the most frequent values, with their counts
    # Of numbers: the few texts that are none, with their counts. They are not read as missing until somebody says so.
    no_numbers: tuple[tuple[str, int], ...] = ()


def infer_label(columns: Sequence[ColumnView]) -> LabelColumn | None:
    """The column to predict: of two values, and by its name, or the first, or the last one."""
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
            # The rarer one is what people look for.
            (negative, _), (positive, _) = view.common[:2]
            return LabelColumn(name=view.name, positive=positive, negative=negative)
    return None


def why_no_label(columns: Sequence[ColumnView], num_rows: int) -> str:
    """Which column might have been the label, and why it is none."""
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
    """Features for the columns that may say something, and why the others are left out."""
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
    """The items of each user in order of time, where names say which columns are user, item and time."""
    matched = _events(columns)
    if matched is None:
        return None
    events, _, item = matched
    name, column = _feature_name(item)
    return FeatureSchema(
        events=events, sequences={name: SequenceFeature(column=column, kind=_kind(item), encoding="vocabulary")}
    )


def guess_targets(columns: Sequence[ColumnView]) -> FeatureSchema | None:
    """Each event as a row with its user, its item and the items before it, where names say which columns those are."""
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
    """The columns of events, and what is known of user and item."""
    by_name = {view.name.lower().partition(":")[0]: view for view in columns if view.type != "list"}
    found = [next((by_name[name] for name in names if name in by_name), None) for names in (_USERS, _ITEMS, _TIMES)]
    user, item, time = found
    if user is None or item is None or time is None:
        return None
    return EventColumns(user=user.name, item=item.name, time=time.name), user, item


def _feature_name(view: ColumnView) -> tuple[str, str | None]:
    """The name of a feature, and its column where that has another name."""
    return view.name.partition(":")[0], view.name if ":" in view.name else None


def with_length(schema: FeatureSchema, length: int) -> FeatureSchema:
    """The same with sequences that are so long at most."""
    return replace(
        schema, sequences={name: replace(each, max_length=length) for name, each in schema.sequences.items()}
    )


def with_rare_values(schema: FeatureSchema) -> FeatureSchema:
    """The same with an id for each value, however rare, where a vocabulary keeps them apart."""
    features = {name: replace(feature, min_count=1) for name, feature in schema.categorical.items()}
    return replace(schema, categorical=features)


def with_own_items(schema: FeatureSchema, items: Container[str]) -> FeatureSchema:
    """The same with a vocabulary for these features, so that no two items are one, however many there are."""
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
    """Whether a logarithm would help: values of many sizes, hardly any below zero."""
    assert view.median is not None and view.largest is not None and view.smallest is not None
    return view.largest > 20 * max(view.median, 1.0) and view.smallest > -10


def _categories(view: ColumnView, *, is_complete: bool) -> dict[str, Any]:
    """As ids, but rare values of what names no thing count as one: they say more about chance than about clicks."""
    if _ID_NAME.search(view.name) or not (is_complete or view.num_values <= _VOCABULARY):
        return _ids(view)
    return {"kind": _kind(view), "encoding": "vocabulary", "min_count": _MIN_COUNT}


def _kind(view: ColumnView) -> KeyKind:
    # What a file has as text stays text: a number in it may be longer than 64 bits.
    return "integer" if "int" in view.stored else "text"


def _ids(view: ColumnView) -> dict[str, Any]:
    """Kind and size of a table of ids: a vocabulary where there are few, buckets where there may be more to come."""
    kind = _kind(view)
    if view.num_values <= _VOCABULARY:
        return {"kind": kind, "encoding": "vocabulary"}
    buckets = 2 ** (4 * view.num_values - 1).bit_length()
    return {"kind": kind, "encoding": "hash", "num_buckets": min(buckets, _MAX_BUCKETS)}
