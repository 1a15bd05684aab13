"""The panel of what was foreseen of a run beside what was measured, from foreseen.json."""

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from kitforge.foundation.untrusted import parse_json
from kitforge.report.metrics import RunRecord
from kitforge.report.number_format import memory, number
from kitforge.report.panels import Panel, html_table

FORESEEN = "foreseen.json"
_ON_CPU = (
    "A CPU does not count the bytes of its tensors while it trains: `kitforge verify --only foreseen` compares them "
    "with torch's memory profiler in a step."
)


def foreseen(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """The panel of the runs that were trained with `trainer.foresee`; None if there is none."""
    parts = [
        (f"<h3>{escape(label)}</h3>" if len(runs) > 1 else "") + found
        for run, label in zip(runs, labels, strict=True)
        if (found := _table(run))
    ]
    return Panel("Foreseen and measured", "".join(parts)) if parts else None


def _table(run: RunRecord) -> str:
    """Empty for a file that is absent or of another shape."""
    try:
        found: Any = parse_json((run.folder / FORESEEN).read_bytes())
        figures = {name: found[name] and float(found[name]) for name in ("peak_bytes", "step_seconds")}
        doubts, is_cpu = [str(each) for each in found["doubts"]], found["device"] == "cpu"
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    measured = {
        name: [value for _, value in run.train[each].finite()] if each in run.train else []
        for name, each in (("peak_bytes", "time/memory_bytes"), ("step_seconds", "time/step_seconds"))
    }
    peak = max(measured["peak_bytes"], default=None) if not is_cpu else None
    median = statistics.median(measured["step_seconds"]) if measured["step_seconds"] else None
    rows = [
        ("Peak memory of rank 0", _cells(figures["peak_bytes"], peak, memory)),
        ("A step, median", _cells(figures["step_seconds"], median, lambda each: f"{number(1e3 * each)} ms")),
    ]
    notes = [*(f"not exact: {each}" for each in doubts), *([_ON_CPU] if is_cpu else [])]
    words = "".join(f'<p class="note">{escape(each)}</p>' for each in notes)
    return html_table("", ["Foreseen", "Measured", "Foreseen / measured"], rows) + words


def _cells(one: float | None, other: float | None, text: Any) -> list[str]:
    ratio = f"{one / other:.2f}" if one and other else "\N{EM DASH}"
    return [*("\N{EM DASH}" if each is None else text(each) for each in (one, other)), ratio]
