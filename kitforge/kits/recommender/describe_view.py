"""An inspection as a person reads it on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kitforge.kits.recommender.describe import TableDescription
from kitforge.kits.recommender.schema import schema_yaml
from kitforge.kits.recommender.schema_inference import ColumnView

_HEAD_COLUMNS = 12


def render(inspection: TableDescription) -> RenderableType:
    """What `kitforge inspect` prints."""
    parts: list[RenderableType] = [_summary(inspection), _columns(inspection), _head(inspection)]
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
        table.add_row(*(Text(cell) for cell in _row(view, inspection.num_rows)))
    return table


def _row(view: ColumnView, num_rows: int) -> list[str]:
    numbers = ["" if value is None else f"{value:g}" for value in (view.smallest, view.median, view.largest)]
    missing = f"{view.num_missing / num_rows:.1%}" if view.num_missing else ""
    common = ", ".join(f"{value} ({count:,})" for value, count in view.common)
    return [view.name, view.type, f"{view.num_values:,}", missing, *numbers, common]


def _head(inspection: TableDescription) -> Table:
    table = Table(box=None, pad_edge=False, title="first rows", title_justify="left")
    for view in inspection.columns[:_HEAD_COLUMNS]:
        table.add_column(Text(view.name))
    for row in inspection.head:
        table.add_row(*(Text(cell) for cell in row[:_HEAD_COLUMNS]))
    return table
