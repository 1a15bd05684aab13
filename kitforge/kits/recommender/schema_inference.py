"""A schema guessed from what is known of a table's columns. Knows no files; whoever knows better writes a schema."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from kitforge.data.tables.columns import KeyKind, LabelColumn
from kitforge.data.tables.events import EventColumns
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.schema import (
    BagFeature,
    BucketFeature,
    CategoricalFeature,
    FeatureSchema,
    NumericFeature,
    SequenceFeature,
)

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
