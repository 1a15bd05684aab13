"""The contracts panel: what `kitforge verify` found on a run, in verify.json."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from kitforge.foundation.untrusted import parse_json
from kitforge.report.metrics import RunRecord
from kitforge.report.number_format import number
from kitforge.report.panels import Panel, html_table

VERDICTS = "verify.json"
_COLUMNS = ("Verdict", "Figure", "Bound", "Words", "Seconds")


def contracts(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """The panel of the runs whose contracts were checked; None if there is none."""
    parts = [
        (f"<h3>{escape(label)}</h3>" if len(runs) > 1 else "") + html_table("Contract", _COLUMNS, rows)
        for run, label in zip(runs, labels, strict=True)
        if (rows := _read(run.folder / VERDICTS))
    ]
    return Panel("Contracts", "".join(parts)) if parts else None


def _read(path: Path) -> list[tuple[str, list[str]]]:
    """A row for each verdict; none for a file that is absent or of another shape."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return []
    verdicts = found.get("contracts") if isinstance(found, dict) else None
    rows = []
    for each in verdicts if isinstance(verdicts, list) else ():
        if isinstance(each, dict):
            values = [each.get(name) for name in ("figure", "bound", "seconds")]
            figure, bound, seconds = (number(float(one)) if isinstance(one, (int, float)) else "" for one in values)
            status, words = (escape(str(each.get(name, ""))) for name in ("status", "words"))
            verdict = f"<b>{status}</b>" if status == "broken" else status
            rows.append((escape(str(each.get("contract", ""))), [verdict, figure, bound, words, seconds]))
    return rows
