"""The run report as one self-contained HTML page: styles and script are inline, nothing is fetched."""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from kitforge.foundation.errors import DataError
from kitforge.foundation.files import check_own, write_text
from kitforge.report.chart import NUM_DASHES, NUM_TONES, draw
from kitforge.report.chart_specs import chart_groups
from kitforge.report.completions import completions
from kitforge.report.config_diff import distinguishing
from kitforge.report.contracts import contracts
from kitforge.report.foreseen import foreseen
from kitforge.report.metrics import RunRecord, read_run
from kitforge.report.panels import Panel, comparison, configuration, events, numbers, problems, tiles, unknown_values
from kitforge.report.samples import samples
from kitforge.report.tables import tables

_FOLDER = Path(__file__).parent
_KIND = "Kitforge report"
# How the name of a run begins that was not given one.
_TIMED = re.compile(r"\d{8}-\d{6}-")


def write_report(folders: Sequence[Path], *, is_live: bool = False) -> Path:
    """Write the report of the runs in `folders` and return its path: report.html of a single run, comparison.html in
    the first folder of several. That of a run that is still training loads itself anew for an hour at most. Raises
    DataError if a folder holds no run or the page cannot be written.
    """
    runs = [read_run(folder) for folder in folders]
    if not runs:
        raise DataError("no run to report", got="no folder", expected="at least one run folder")
    target = folders[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    try:
        check_own(target, "report", overwrite=target.is_file() and _KIND in target.read_text("utf-8", "replace"))
        further = (show(runs, run_labels(runs)) for show in (foreseen, tables, completions, contracts))
        page = render(runs, [panel for panel in further if panel is not None])
        write_text(target, page.replace("<html", f'<html data-live="{time.time():.0f}"', 1) if is_live else page)
    except OSError as error:
        raise DataError(f"the report cannot be written to {str(target)!r}", got=error.strerror) from error
    return target


def render(runs: Sequence[RunRecord], panels: Sequence[Panel | tuple[str, str]] = ()) -> str:
    """The page about `runs`, with further `panels` after the curves; the same runs give the same page."""
    labels = run_labels(runs)
    heading = labels[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = "".join(_section(Panel(*panel)) for panel in (*_curves(runs, labels), *panels, *_records(runs, labels)))
    top = tiles(runs[0]) if len(runs) == 1 else _chips(labels) + _section(comparison(runs, labels))
    return document(heading, _KIND, f"{problems(runs, labels)}{top}{body}")


def document(heading: str, kind: str, main: str) -> str:
    """A whole page around the HTML `main`, which is trusted; `heading` is escaped."""
    style, script = (_FOLDER / "page.css").read_text("utf-8"), (_FOLDER / "page.js").read_text("utf-8")
    # Nothing is fetched, and only our own script runs.
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(heading)} \N{MIDDLE DOT} {kind}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><p>{kind}</p><h1>{escape(heading)}</h1></header>\n"
        f"<main>\n{main}</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )
    # Text cut within a character holds lone surrogates, which UTF-8 cannot encode.
    return page.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; of several that are called by their time, the options in which they differ. Equal names get
    their parent folder, or a number."""
    names = [run.name for run in runs]
    if len(runs) > 1 and all(_TIMED.match(name) for name in names):
        distinct = distinguishing([run.config_text for run in runs])
        if distinct is not None:
            return distinct
    labels = [
        run.name if names.count(run.name) == 1 else f"{run.folder.resolve().parent.name}/{run.name}" for run in runs
    ]
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: index + 1].count(label)})"
        for index, label in enumerate(labels)
    ]


def _curves(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Panel]:
    series = [series for run in runs for series in (*run.train.values(), *run.eval.values())]
    if not series:
        return [Panel("Curves", '<p class="note">This run has logged no numbers yet.</p>')]
    steps = [step for one in series for step in (min(one.steps), max(one.steps))]
    parts = [
        Panel(title, f'<div class="charts">{"".join(draw(chart, steps) for chart in drawn)}</div>')
        for title, drawn in chart_groups(runs, labels)
    ]
    note = '<noscript><p class="note">Without scripts no curves are drawn; the table has their numbers.</p></noscript>'
    return [*parts[:-1], Panel(parts[-1].title, note + parts[-1].html + numbers(runs, labels))]


def _records(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Panel]:
    found = (
        unknown_values(runs, labels),
        _each("Samples", samples, [(run, label) for run, label in zip(runs, labels, strict=True) if run.samples], runs),
        _each("Events", events, [(run, label) for run, label in zip(runs, labels, strict=True) if run.events], runs),
        configuration(runs, labels),
    )
    return [panel for panel in found if panel is not None]


def _each(
    title: str, show: Callable[[RunRecord], str], some: Sequence[tuple[RunRecord, str]], runs: Sequence[RunRecord]
) -> Panel | None:
    """One panel of the runs `some`, each under its name unless there is only one run."""
    if not some:
        return None
    if len(runs) == 1:
        return Panel(title, show(runs[0]))
    parts = "".join(f"<div><h3>{escape(label)}</h3>{show(run)}</div>" for run, label in some)
    return Panel(title, f'<div class="columns">{parts}</div>')


def _section(panel: Panel) -> str:
    return f"<section><h2>{escape(panel.title)}</h2>{panel.html}</section>\n"


def _chips(labels: Sequence[str]) -> str:
    """The runs with their colours; the script makes them switches."""
    chips = "".join(
        f'<li><button type="button" disabled aria-pressed="true" data-switch="{run}" '
        f'class="tone-{run % NUM_TONES} dash-{run % NUM_DASHES}"><svg class="swatch" viewBox="0 0 22 8" '
        f'aria-hidden="true"><path class="trend" d="M1 4h20"/></svg>{escape(label)}</button></li>'
        for run, label in enumerate(labels)
    )
    return f'<ul class="chips" aria-label="Runs">{chips}</ul>'
