"""The embedding-table panel: lookups by tier, rows moved between tiers, and the hit rate by cache size.

It reads tables.jsonl: a line of kind "curve" holds (rows, hit rate) of device tiers of several sizes, from a sample of
the ids of the first steps; lines of kind "tables" hold counts since the line before.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from kitforge.foundation.untrusted import parse_json
from kitforge.report.chart import Chart, ChartLine, draw
from kitforge.report.metrics import RunRecord, Series
from kitforge.report.panels import Panel

TABLES_FILE = "tables.jsonl"


def tables(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """The panel of the runs with embedding tables; None if there are none."""
    found = [(label, records) for run, label in zip(runs, labels, strict=True) if (records := _read(run.folder))]
    if not found:
        return None
    parts = [_run("" if len(runs) == 1 else label, records) for label, records in found]
    return Panel("Tables", "".join(parts))


def _run(label: str, records: list[dict[str, Any]]) -> str:
    counts = [record for record in records if record.get("kind") == "tables"]
    names = dict.fromkeys(name for record in counts for name in record["tables"])
    drawn = [
        _charts(name, [(record["step"], record["tables"][name]) for record in counts if name in record["tables"]])
        for name in names
    ]
    bent = [_curve(record) for record in records if record.get("kind") == "curve"]
    heading = f"<h3>{escape(label)}</h3>" if label else ""
    return f'{heading}<div class="charts">{"".join(drawn + bent)}</div>'


def _charts(name: str, counts: list[tuple[int, dict[str, Any]]]) -> str:
    """The charts of one table: lookups by tier, and rows moved to each tier."""
    steps = tuple(step for step, _ in counts)
    totals = [max(sum(count["hits"].values()), 1) for _, count in counts]
    tiers = [tier for tier in counts[0][1]["hits"] if any(count["hits"].get(tier, 0) for _, count in counts)]
    hits = {
        tier: tuple(count["hits"].get(tier, 0) / total for (_, count), total in zip(counts, totals, strict=True))
        for tier in tiers
    }
    moved_to = dict.fromkeys(tier for _, count in counts for tier in count["moved"])
    moved = {tier: tuple(float(count["moved"].get(tier, 0)) for _, count in counts) for tier in moved_to}
    return "".join(
        draw(_chart(title, unit, steps, values), steps)
        for title, unit, values in (
            (f"{name}: lookups by tier", "fraction of rows", hits),
            (f"{name}: rows written", "rows written to each tier", moved),
        )
        if values
    )


def _chart(
    title: str, unit: str, steps: tuple[int, ...], values: dict[str, tuple[float, ...]], axis: str = "step"
) -> Chart:
    lines = tuple(
        ChartLine(label=label, series=Series(steps=steps, values=each), run=0, tone=tone)
        for tone, (label, each) in enumerate(values.items())
    )
    return Chart(title=title, unit=unit, lines=lines, axis=axis)


def _curve(record: dict[str, Any]) -> str:
    """The hit rate of a device tier by its size, from the stack distances of the first batches."""
    sizes = tuple(int(rows) for rows, _ in record["points"])
    values = tuple(float(rate) for _, rate in record["points"])
    title = f"{record['table']}: hit rate by device tier size"
    chart = _chart(title, "fraction of rows", sizes, {"LRU, warm cache": values}, axis="rows")
    return draw(chart, sizes)


def _read(folder: Path) -> list[dict[str, Any]]:
    """All lines; a torn last line of a killed run is left out."""
    try:
        lines = (folder / TABLES_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    records = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
