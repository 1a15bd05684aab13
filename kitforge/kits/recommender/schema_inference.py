"""The schema of a table without one: which columns are label, ids, categories, quantities and lists, and why others are
left out. What is decided is logged when a run starts, and shown in its report and by `kitforge inspect`."""

import re
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kitforge.data.tables.columns import KeyKind, LabelColumn
from kitforge.data.tables.events import EventColumns
from kitforge.data.tables.source import UNNAMED
from kitforge.foundation.errors import DataError, nearest
from kitforge.kits.recommender.column_names import (
    ITEMS,
    LABELS,
    TIMES,
    USERS,
    id_kind_of,
    plain_name,
    positive_of,
    without_type,
)
from kitforge.kits.recommender.schema import (
    BagFeature,
    BucketFeature,
    CategoricalFeature,
    FeatureSchema,
    NumericFeature,
    SequenceFeature,
)

# Other: a type that no feature is read from, such as a date or a struct.
ColumnType = Literal["number", "integer", "text", "list", "nothing", "other"]
# Integer columns with at most this many distinct values are categorical.
FEW_VALUES = 20
_TIME_NAME = re.compile(r"history|sequence|items|clicked", re.IGNORECASE)
_VOCABULARY = 1000
_MIN_COUNT = 2
_MAX_BUCKETS = 2**20
# Numbers enter as values and as buckets, which express non-monotonic effects and single values early in training.
_RANGES = 32


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
    holds_times: bool = False  # dates, ISO 8601 texts, or Unix times
    behaves_as_ids: bool = False  # whole numbers that repeat, and whose size says nothing about their frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelChoice:
    """What is known of the label before the table is looked at."""

    name: str | None = None  # its column; None: guessed by name, then by place
    positive: str | None = None  # the value that counts as 1; None: guessed where the values say it
    by_position: bool = True  # whether a column of two values that comes first or last may be the label


ANY_LABEL = LabelChoice()


def infer_label(
    columns: Sequence[ColumnView], choice: LabelChoice = ANY_LABEL, *, is_complete: bool = True
) -> LabelColumn | None:
    """The label column: it has two values that say which is positive, and a known name or the first or last position.
    Of the first rows of a longer table, which may be sorted, one of 0 and 1 is enough beside a name. None if there is
    none. Raises DataError where the column or the value of `choice` does not exist."""
    if choice.name is not None:
        names = [view.name for view in columns]
        if choice.name not in names:
            fix = nearest(choice.name, names)
            raise DataError("there is no such label", got=f"data.label={choice.name}", expected=names[:40], fix=fix)
        return _label_of(columns[names.index(choice.name)], choice.positive, is_complete=is_complete)
    two = [view for view in columns if _is_binary(view)]
    named = [view for view in two if plain_name(view.name) in LABELS]
    ends = [view for view in two if view in (columns[0], columns[-1])] if choice.by_position else []
    if not is_complete:
        named += [view for view in columns if plain_name(view.name) in LABELS and view not in two]
    for view in (*named, *ends):
        if (label := _label_of(view, choice.positive, is_complete=is_complete)) is not None:
            return label
    return None


def _is_binary(view: ColumnView) -> bool:
    return view.num_values == 2 and view.num_missing == 0 and view.type not in ("list", "other")


def _label_of(view: ColumnView, positive: str | None, *, is_complete: bool) -> LabelColumn | None:
    """A column as the label; None where its values do not say what is positive."""
    if not is_complete and view.num_values == 1 and view.common[0][0] in ("0", "1", "false", "true"):
        return LabelColumn(name=view.name, positive=positive)
    values = sorted(value for value, _ in view.common)
    if positive is not None:
        others = [value for value in values if value != positive]
        negative = others[0] if len(others) == 1 and view.num_values == 2 else None
        return LabelColumn(name=view.name, positive=positive, negative=negative)
    if not _is_binary(view):
        return None
    if values in (["0", "1"], ["false", "true"]):
        return LabelColumn(name=view.name)
    if values in (["-1", "1"], ["+1", "-1"]):
        negative, positive = sorted(values, key=int)
        return LabelColumn(name=view.name, positive=positive, negative=negative)
    # Of other numbers, such as 1 and 2, either may be the positive one.
    pair = positive_of(*values) if view.type == "text" else None
    return None if pair is None else LabelColumn(name=view.name, positive=pair[0], negative=pair[1])


def why_no_label(
    columns: Sequence[ColumnView], num_rows: int, choice: LabelChoice = ANY_LABEL, *, is_complete: bool = True
) -> str:
    """Why no column is the label."""
    named = [view for view in columns if plain_name(view.name) in LABELS]
    if choice.name is not None:
        named = [view for view in columns if view.name == choice.name]
    for view in named or [columns[0], columns[-1]]:
        values = ", ".join(value for value, _ in view.common)
        if view.type not in ("list", "other") and view.num_missing and view.num_values <= 2:
            return f"{view.name!r} has no value in {view.num_missing:,} of {num_rows:,} rows"
        if named and view.num_values == 1:
            return (
                f"{view.name!r} is {values} in {'every row' if is_complete else f'all of the first {num_rows:,} rows'}"
            )
        if named and _is_binary(view):
            return f"{view.name!r} holds {values}, which do not say what is positive"
        if named:
            return f"{view.name!r} holds {view.num_values:,} different values ({values}...), a label has two: 0 and 1"
    two = [view.name for view in columns if _is_binary(view)]
    ends = [view.name for view in columns if _is_binary(view) and view in (columns[0], columns[-1])]
    reason = f"of those with two values ({', '.join(two)}) none is first or last" if two else "none has two values"
    reason = f"{ends[0]!r} has two values that do not say what is positive" if ends and choice.by_position else reason
    return f"no column is called label, click, clicked, target, y or much like that, and {reason}"


def infer_schema(
    columns: Sequence[ColumnView],
    label: LabelColumn | None,
    num_rows: int,
    *,
    is_complete: bool,
    ids: Collection[str] = (),
) -> FeatureSchema:
    """Features for the useful columns, and the reasons why others are left out. `ids`: columns that are ids where
    neither name nor values say otherwise."""
    names = {view.name for view in columns}
    numeric: dict[str, NumericFeature] = {}
    bucketed: dict[str, BucketFeature] = {}
    categorical: dict[str, CategoricalFeature] = {}
    bags: dict[str, BagFeature] = {}
    sequences: dict[str, SequenceFeature] = {}
    left_out: dict[str, str] = {}
    for view in columns:
        reason = _useless(view, label, num_rows, is_complete=is_complete, is_id=view.name in ids)
        if reason is not None:
            left_out[view.name] = reason
        elif view.type == "list" and _TIME_NAME.search(view.name):
            sequences[view.name] = SequenceFeature(**_ids(view))
        elif view.type == "list":
            bags[view.name] = BagFeature(**_ids(view))
        elif _is_quantity(view, view.name in ids):
            assert view.median is not None and view.largest is not None and view.smallest is not None
            numeric[view.name] = NumericFeature(log=view.largest > 20 * max(view.median, 1.0) and view.smallest > -10)
            bucketed[_unused(f"{view.name}_range", names)] = BucketFeature(column=view.name, num_buckets=_RANGES)
        elif id_kind_of(view.name) == "id" or not (is_complete or view.num_values <= _VOCABULARY):
            categorical[view.name] = CategoricalFeature(**_ids(view))
        else:
            # Rare values of a column that holds no ids share the unknown id, since they are mostly noise.
            kind = _kind(view)
            categorical[view.name] = CategoricalFeature(kind=kind, encoding="vocabulary", min_count=_MIN_COUNT)
    if label is not None:
        del left_out[label.name]
    if not (numeric or categorical or bags or sequences):
        raise DataError("no column of the table can be a feature", got=", ".join(left_out), fix="write data.schema")
    return FeatureSchema(
        label=label,
        numeric=numeric,
        bucketed=bucketed,
        categorical=categorical,
        bags=bags,
        sequences=sequences,
        left_out=left_out,
    )


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
    by_name = {plain_name(view.name): view for view in columns if view.type != "list"}
    found = [next((by_name[name] for name in names if name in by_name), None) for names in (USERS, ITEMS, TIMES)]
    user, item, time = found
    if user is None or item is None or time is None:
        return None
    return EventColumns(user=user.name, item=item.name, time=time.name), user, item


def _feature_name(view: ColumnView) -> tuple[str, str | None]:
    """The name of a feature, and its column if that differs."""
    name = without_type(view.name)
    return name, view.name if name != view.name else None


def _useless(
    view: ColumnView, label: LabelColumn | None, num_rows: int, *, is_complete: bool, is_id: bool
) -> str | None:
    if label is not None and view.name == label.name:
        return "the label"
    if plain_name(view.name) in LABELS and view.num_values == 2 and label is None:
        return "a label whose values do not say which is positive (data.label=COLUMN data.positive=VALUE)"
    if view.name.startswith(UNNAMED):
        return "a column without a name"
    newest = f"; data.split=time data.time_column={view.name} evaluates on the newest rows" if view.holds_times else ""
    if view.type == "other":
        return f"of type {view.stored}, which is neither a number, a text nor a list of ids{newest}"
    if view.holds_times:
        return f"times, which do not come again unless data.schema says what of them does{newest}"
    if view.num_values <= 1 and view.num_missing == 0 and is_complete:
        return "always the same"
    if view.type == "nothing":
        return "no values"
    is_category = view.type in ("text", "integer") and not _is_quantity(view, is_id)
    if is_category and view.num_values == num_rows > FEW_VALUES:
        return "a different value in every row"
    return None


def _unused(name: str, names: Container[str]) -> str:
    return name if name not in names else _unused(f"{name}_", names)


def _is_quantity(view: ColumnView, is_id: bool) -> bool:
    """Whether a column is read as numbers: by its name where that says it, else by its values. Few whole numbers are
    categories, unless a type in the name says otherwise."""
    kind = id_kind_of(view.name)
    if view.type == "number":
        return not view.name.endswith(":token")
    if view.type != "integer" or (view.num_values <= FEW_VALUES and not view.name.endswith(":float")):
        return False
    return kind == "quantity" or (kind is None and not is_id and not view.behaves_as_ids)


def _kind(view: ColumnView) -> KeyKind:
    # Text columns stay text: a number in them may exceed 64 bits.
    return "integer" if "int" in view.stored and "uint64" not in view.stored else "text"


def _ids(view: ColumnView) -> dict[str, Any]:
    """Encoding of ids: a vocabulary for few values, hashing for many."""
    kind = _kind(view)
    if view.num_values <= _VOCABULARY:
        return {"kind": kind, "encoding": "vocabulary"}
    buckets = 2 ** (4 * view.num_values - 1).bit_length()
    return {"kind": kind, "encoding": "hash", "num_buckets": min(buckets, _MAX_BUCKETS)}
