"""`kitforge inspect`: statistics of a table's columns, the label rate, the first rows and a proposed schema."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kitforge.data.features import python_values
from kitforge.data.tables.bad_rows import BadRows, DecimalMark
from kitforge.data.tables.cells import (
    is_text,
    join_tables,
    lists_of,
    one_array,
    plain_cells,
    pyarrow,
    texts_of,
    with_points,
)
from kitforge.data.tables.python_rows import FIRST_ROWS
from kitforge.data.tables.source import TableSource, TableSourceConfig, open_table
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.column_names import is_time_name
from kitforge.kits.recommender.schema import FeatureSchema, schema_summary, schema_yaml
from kitforge.kits.recommender.schema_inference import (
    ANY_LABEL,
    FEW_VALUES,
    ColumnView,
    LabelChoice,
    guess_targets,
    infer_event_schema,
    infer_label,
    infer_schema,
    why_no_label,
)

DESCRIBED_ROWS = FIRST_ROWS
_HEAD_COLUMNS = 12
_HEAD_ROWS = 5
# A column with at least this fraction of numbers is numeric; its other cells probably mean missing values.
_MIN_NUMERIC_FRACTION = 0.95
# Whole numbers that may be ids occur so often on average; of ids, neighbours have unlike counts, and the gaps of the
# larger half are like those of the smaller one.
_MIN_REPEATS = 3
_MAX_LIKENESS = 0.2
_MAX_GAP_RATIO = 4
# Seconds since 1970, in a column whose name says so; finer units are larger.
_OLDEST_TIME = 1e8
_LIST = r"^\d{1,18}( \d{1,18})*$"
_DIGITS_IN_THREES = r"^\d{1,3}( \d{3})*$"
_ISO_TIME = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?)?\s*(Z|UTC|GMT|[+-]\d{2}:?(\d{2})?)?$"
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDescription:
    """Statistics of a table, and the proposed schema."""

    name: str
    num_rows: int  # rows that were read
    is_complete: bool  # whether these are all rows
    columns: tuple[ColumnView, ...]
    head: tuple[tuple[str, ...], ...]  # the first rows, as text
    schema: FeatureSchema
    label_rate: float | None
    bad_rows: Mapping[str, int]  # rows that could not be read, by reason
    no_label: str | None = None  # why no column is the label
    sequences: FeatureSchema | None = None  # the same rows as events: one sequence per user
    targets: FeatureSchema | None = None  # the same events: a row each, with the user and the history

    @property
    def left_out(self) -> Mapping[str, str]:
        """Columns that the schema does not use, and why."""
        return self.schema.left_out

    @property
    def missing_values(self) -> tuple[str, ...]:
        """Texts in numeric columns that probably mean missing values: candidates for data.missing_values."""
        return tuple(dict.fromkeys(text for view in self.columns for text, _ in view.no_numbers))

    @property
    def yaml(self) -> str:
        """The schema as YAML for `data.schema`."""
        return schema_yaml(self.schema)


def describe_table(
    spec: object,
    config: TableSourceConfig | None = None,
    num_rows: int = DESCRIBED_ROWS,
    choice: LabelChoice = ANY_LABEL,
    ids: Collection[str] = (),
) -> TableDescription:
    """Describe the first rows of a table. `choice`: what is known of the label; `ids`: columns that are ids where
    neither name nor values say otherwise. Bad rows are counted under any policy. Raises DataError for a table without
    rows or features, and for an iterator, whose rows would be consumed."""
    source = spec if isinstance(spec, TableSource) else open_table(spec, config or TableSourceConfig())
    if source.is_once:
        raise DataError(
            "rows that can be read only once cannot be looked at first",
            got=type(spec).__name__,
            expected="a file, a list, a dataset",
            fix="give a schema (data.schema=FILE)",
        )
    table, bad, is_complete = _first_rows(source, num_rows)
    if table.num_rows == 0:
        raise DataError(f"there are no rows in {source.name}", got=f"{bad.total} bad ones", expected="at least one")
    decimal = source.cells.decimal
    columns = tuple(_view(name, table.column(name), decimal) for name in table.column_names)
    label = infer_label(columns, choice, is_complete=is_complete)
    schema = infer_schema(columns, label, table.num_rows, is_complete=is_complete, ids=ids)
    label_rate = None
    if label is not None:
        labels: Any = texts_of(plain_cells(one_array(table.column(label.name))))
        positive = ("1", "true") if label.positive is None else (label.positive,)
        label_rate = sum(value in positive for value in labels.to_pylist()) / len(labels)
    texts = [[_cell(value) for value in python_values(column)] for column in table.slice(0, _HEAD_ROWS).columns]
    return TableDescription(
        name=source.name,
        num_rows=table.num_rows,
        is_complete=is_complete,
        columns=columns,
        head=tuple(zip(*texts, strict=True)),
        schema=schema,
        label_rate=label_rate,
        bad_rows=dict(bad.counts),
        no_label=why_no_label(columns, table.num_rows, choice, is_complete=is_complete) if label is None else None,
        sequences=infer_event_schema(columns),
        targets=guess_targets(columns),
    )


def _first_rows(source: TableSource, num_rows: int) -> tuple[Any, BadRows, bool]:
    tables: list[Any] = []
    bad, count = BadRows(policy="skip"), 0
    for job in source.jobs(source.names):
        if count >= num_rows:
            return join_tables(tables).slice(0, num_rows), bad, False
        chunk = job()
        bad.handle(chunk.bad)
        tables.append(chunk.table)
        count += chunk.table.num_rows
    return join_tables(tables).slice(0, num_rows), bad, count <= num_rows


def _view(name: str, column: Any, decimal: DecimalMark) -> ColumnView:
    types, compute = pyarrow().types, pyarrow("pyarrow.compute")
    array = plain_cells(one_array(column))
    stored = str(array.type)
    missing = array.null_count
    if missing == len(array):
        return ColumnView(name=name, type="nothing", stored=stored, num_values=0, num_missing=missing)
    if is_text(array) and _holds_lists(array.drop_null()):
        array, stored = compute.split_pattern(array, " "), "list<int64>"
    elif is_text(array) and (lists := lists_of(array)).null_count == missing:
        array, stored = lists, "list<string>"
    if types.is_list(array.type) or types.is_large_list(array.type):
        items = texts_of(plain_cells(compute.list_flatten(array)))
        if items is None or types.is_floating(array.type.value_type) or _has_fractions(items):
            return ColumnView(name=name, type="other", stored=stored, num_values=0, num_missing=missing)
        num_values = compute.count_distinct(items).as_py()
        return ColumnView(name=name, type="list", stored=stored, num_values=num_values, num_missing=missing)
    texts = texts_of(array)
    if texts is None:
        is_time = types.is_timestamp(array.type) or types.is_date(array.type)
        return ColumnView(
            name=name, type="other", stored=stored, num_values=0, num_missing=missing, holds_times=is_time
        )
    counts = compute.value_counts(texts.drop_null())
    frequent = np.argsort(-np.asarray(counts.field("counts")), kind="stable")[:3]
    view = ColumnView(
        name=name,
        type="text",
        stored=stored,
        num_values=len(counts),
        num_missing=missing,
        common=tuple((pair["values"], pair["counts"]) for pair in counts.take(frequent).to_pylist()),
        holds_times=is_text(array) and compute.all(compute.match_substring_regex(array, _ISO_TIME)).as_py(),
    )
    return _with_range(view, array.drop_null(), decimal)


def _has_fractions(items: Any) -> bool:
    """Whether texts of items are numbers, and not all of them whole."""
    compute, items = pyarrow("pyarrow.compute"), items.drop_null()
    if not compute.all(compute.match_substring_regex(items, _NUMBER)).as_py():
        return False
    return bool((np.mod(np.asarray(items.cast(pyarrow().float64())), 1) != 0).any())


def _holds_lists(texts: Any) -> bool:
    """Whether all texts are integers separated by spaces, mostly several, and not thousands groups (1 234 567)."""
    compute = pyarrow("pyarrow.compute")

    def fraction(pattern: str) -> float:
        return compute.mean(compute.match_substring_regex(texts, pattern)).as_py() or 0.0

    return len(texts) > 0 and fraction(_LIST) == 1.0 and fraction(" ") >= 0.5 and fraction(_DIGITS_IN_THREES) < 1.0


def _with_range(view: ColumnView, values: Any, decimal: DecimalMark) -> ColumnView:
    """The view with numeric statistics, if nearly all values are finite numbers; the others are listed."""
    arrow, compute = pyarrow(), pyarrow("pyarrow.compute")
    if arrow.types.is_boolean(values.type):
        return view
    if is_text(values):
        texts = with_points(values, decimal)
        is_number = compute.match_substring_regex(texts, _NUMBER)
        numbers = np.asarray(compute.cast(texts.filter(is_number), arrow.float64(), safe=False))
        odd = values.filter(compute.invert(is_number))
    else:
        numbers = np.asarray(compute.cast(values, arrow.float64(), safe=False))
        odd = values.filter(arrow.array(np.isinf(numbers)))
        numbers = numbers[np.isfinite(numbers)]
    if len(numbers) == 0 or len(numbers) < _MIN_NUMERIC_FRACTION * (len(numbers) + len(odd)):
        return view
    counts = sorted(compute.value_counts(odd).to_pylist(), key=lambda pair: -pair["counts"])
    is_integer = bool((numbers == np.floor(numbers)).all())
    return replace(
        view,
        type="integer" if is_integer else "number",
        smallest=float(numbers.min()),
        largest=float(numbers.max()),
        median=float(np.median(numbers)),
        no_numbers=tuple((_cell(pair["values"]), pair["counts"]) for pair in counts),
        behaves_as_ids=is_integer and _behave_as_ids(numbers),
        holds_times=is_time_name(view.name) and float(np.median(numbers)) >= _OLDEST_TIME,
    )


def _behave_as_ids(numbers: NDArray[np.float64]) -> bool:
    """Whether whole numbers repeat, and nothing depends on their size: close numbers are not equally frequent, as close
    quantities are, and large ones are no farther apart than small ones."""
    values, counts = np.unique(numbers, return_counts=True)
    if len(values) <= FEW_VALUES or len(numbers) < _MIN_REPEATS * len(values) or counts.min() == counts.max():
        return False
    gaps = np.diff(values)
    half = len(gaps) // 2
    is_even = gaps[half:].mean() < _MAX_GAP_RATIO * gaps[:half].mean()
    likeness = float(np.corrcoef(counts[:-1], counts[1:])[0, 1]) if counts[1:].std() and counts[:-1].std() else 0.0
    return bool(is_even and likeness < max(_MAX_LIKENESS, 2 / len(values) ** 0.5))


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 32 else text[:31] + "…"


def render_description(inspection: TableDescription) -> RenderableType:
    """The output of `kitforge inspect`."""
    parts: list[RenderableType] = [_summary(inspection), _columns(inspection), _head(inspection)]
    parts += [Text(line) for line in schema_summary(replace(inspection.schema, left_out={}))]
    for name, reason in inspection.left_out.items():
        parts.append(Text(f"left out of the schema: {name}, {reason}"))
    parts.append(Text("\nA schema to begin with; data.schema=FILE reads it:\n"))
    parts.append(Syntax(inspection.yaml, "yaml", background_color="default"))
    if inspection.sequences is not None:
        parts.append(Text("\nAs events, a sequence of items a user, which model=sasrec takes without data.schema:\n"))
        parts.append(Syntax(schema_yaml(inspection.sequences), "yaml", background_color="default"))
    return Group(*parts)


def _summary(inspection: TableDescription) -> Text:
    extent = "" if inspection.is_complete else "the first "
    lines = [f"{inspection.name}: {extent}{inspection.num_rows:,} rows, {len(inspection.columns)} columns"]
    if inspection.label_rate is not None and inspection.schema.label is not None:
        lines.append(f"label {inspection.schema.label.name}: {inspection.label_rate:.2%} positive")
    if inspection.no_label is not None:
        lines.append(f"no label: {inspection.no_label}")
    for view in inspection.columns:
        if view.no_numbers:
            odd = ", ".join(f"{text} ({count:,})" for text, count in view.no_numbers[:8])
            lines.append(f"{view.name} is a number but for {odd}")
    if inspection.missing_values:
        texts = ",".join(f'"{text}"' for text in inspection.missing_values[:8])
        lines.append(f"to read such cells as missing: data.missing_values='[{texts}]'")
    lines += [f"bad rows: {count:,} {reason}" for reason, count in inspection.bad_rows.items()]
    return Text("\n".join(lines))


def _columns(inspection: TableDescription) -> Table:
    table = Table("column", "type", box=None, pad_edge=False)
    for title in ("values", "missing", "smallest", "median", "largest"):
        table.add_column(title, justify="right")
    table.add_column("most frequent")
    for view in inspection.columns:
        numbers = ["" if value is None else f"{value:g}" for value in (view.smallest, view.median, view.largest)]
        missing = f"{view.num_missing / inspection.num_rows:.1%}" if view.num_missing else ""
        common = ", ".join(f"{_cell(value)} ({count:,})" for value, count in view.common)
        cells = (view.name, view.type, f"{view.num_values:,}", missing, *numbers, common)
        table.add_row(*map(Text, cells))
    return table


def _head(inspection: TableDescription) -> Table:
    table = Table(box=None, pad_edge=False, title="first rows", title_justify="left")
    for view in inspection.columns[:_HEAD_COLUMNS]:
        table.add_column(Text(view.name))
    for row in inspection.head:
        table.add_row(*(Text(cell) for cell in row[:_HEAD_COLUMNS]))
    return table
