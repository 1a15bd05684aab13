"""The panels of the page besides the curves, as HTML: numbers, comparison, events, configuration.

Everything that comes from a run is escaped.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kitforge.report.chart_specs import is_bad
from kitforge.report.config_diff import differences, notes
from kitforge.report.metrics import LoggedEvent, RunRecord
from kitforge.report.number_format import number
from kitforge.report.summary import SHARES, Figure, by_number, headline, is_curve, kept_value, last_values

# The page names the number of events beyond this one.
_MOST_EVENTS = 200
# Events of one name in a row that are folded into one line.
_FOLDED_EVENTS = 4
_ABSENT = "\N{EM DASH}"


class Panel(NamedTuple):
    """A section of the page. The title is escaped here; `html` is trusted, so its maker escapes all data."""

    title: str
    html: str


def tiles(run: RunRecord) -> str:
    """The headline numbers of one run."""
    items = "".join(
        f"<div><dt>{escape(figure.label)}</dt><dd><b>{escape(figure.text)}</b>{_detail(figure)}</dd></div>"
        for figure in headline(run)
    )
    return f'<dl class="tiles">{items}</dl>'


def comparison(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel:
    """The final numbers of several runs: one row per number, the best in bold."""
    columns = [{figure.label: figure for figure in (*headline(run), *last_values(run))} for run in runs]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        figures = [column.get(name) for column in columns]
        rows.append((escape(name), [_cell(figure, is_best(figure, figures)) for figure in figures]))
    if [run.name for run in runs] != list(labels):
        rows.append(("Folder", [escape(run.name) for run in runs]))
    return Panel("Final numbers", html_table("", [escape(label) for label in labels], rows))


def numbers(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """A table of all curves: first, last, lowest and highest value."""
    rows = []
    for run, label in zip(runs, labels, strict=True):
        prefix = "" if len(runs) == 1 else f"{label}: "
        found = [(group, name) for group in (run.train, run.eval) for name in sorted(group, key=by_number)]
        for group, name in found:
            points = group[name].finite()
            if points and is_curve(name):
                kept = (points[0], points[-1], min(points, key=itemgetter(1)), max(points, key=itemgetter(1)))
                cells = [f"{number(value)} <small>at {step:,}</small>" for step, value in kept]
                rows.append((f"{escape(prefix)}<code>{escape(name)}</code>", cells))
    table = html_table("Metric", ["First", "Last", "Lowest", "Highest"], rows)
    return f"<details><summary>The curves as a table</summary>{table}</details>"


def unknown_values(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """A table of the shares of values that training never saw, the largest first; None where no run has any."""
    shares = [{name: kept_value(run, name) for name in run.eval if name.startswith(SHARES)} for run in runs]
    names = {name for each in shares for name in each}
    largest = {name: max(0.0, *(each.get(name, 0.0) for each in shares)) for name in names}
    rows = [
        (
            f"<code>{escape(name.removeprefix(SHARES))}</code>",
            [f"{each[name]:.1%}" if name in each else _ABSENT for each in shares],
        )
        for name in sorted(largest, key=lambda name: (-largest[name], name))
        if largest[name] > 0
    ]
    if not rows:
        return None
    left = len(largest) - len(rows)
    note = f'<p class="note">Of the values in the evaluation; {left:,} further features have none.</p>'
    table = html_table("Feature", ["Share"] if len(runs) == 1 else [escape(label) for label in labels], rows)
    return Panel("Values that training never saw", table + note)


def events(run: RunRecord) -> str:
    """The events of one run, in order."""
    shown = run.events[-_MOST_EVENTS:]
    items = []
    for (name, has_bad), group in groupby(shown, key=lambda event: (event.name, is_bad(event))):
        found = list(group)
        item = "".join(map(_event, found))
        if len(found) >= _FOLDED_EVENTS:
            mood = ' class="bad"' if has_bad else ""
            item = (
                f"<li{mood}><span>steps {found[0].step:,} to {found[-1].step:,}</span> <details><summary>"
                f'<b>{escape(name)}</b> {len(found):,} times</summary><ol class="events">{item}</ol></details></li>'
            )
        items.append(item)
    left = len(run.events) - len(shown)
    note = f'<p class="note">{left:,} earlier events are not shown here; metrics.jsonl holds all of them.</p>'
    return (note if left else "") + f'<ol class="events">{"".join(items)}</ol>'


def configuration(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """The configuration of one run, or the differences between several."""
    texts = [run.config_text for run in runs]
    if not any(texts):
        return None
    if len(runs) == 1:
        # A parser drops the first line break after <pre>.
        text = f"<details><summary>config.yaml</summary><pre>\n{escape(texts[0])}</pre></details>"
        return Panel("Configuration", text)
    differing, num_equal = differences(texts)
    rows = [
        (f"<code>{escape(name)}</code>", [_ABSENT if value is None else escape(value) for value in row])
        for name, row in differing.items()
    ]
    note = f'<p class="note">{num_equal:,} other options are the same.</p>'
    table = html_table("Option", [escape(label) for label in labels], rows) if rows else ""
    return Panel("Differences of configuration", table + note)


def problems(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """The files and lines that could not be read, and warnings about the inputs; empty if there are none."""
    prefixes = [""] if len(runs) == 1 else [f"{label}: " for label in labels]
    of_runs = [(*run.problems, *notes(run.config_text)) for run in runs]
    found = [prefix + problem for own, prefix in zip(of_runs, prefixes, strict=True) for problem in own]
    if not found:
        return ""
    left = len(found) - 12
    more = f"<li>and {left:,} more of the kind</li>" if left > 0 else ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in found[:12])
    return f'<aside class="problems" aria-label="Problems"><ul>{items}{more}</ul></aside>'


def _detail(figure: Figure) -> str:
    return f" <small>{escape(figure.detail)}</small>" if figure.detail else ""


def _cell(figure: Figure | None, is_best: bool) -> str:
    if figure is None:
        return _ABSENT
    text = escape(figure.text)
    return (f"<strong>{text}</strong>" if is_best else text) + _detail(figure)


def is_best(figure: Figure | None, figures: Iterable[Figure | None]) -> bool:
    """Whether no other figure is better and at least one is worse."""
    if figure is None or figure.goal is None or not math.isfinite(figure.value):
        return False
    values = [other.value for other in figures if other is not None and math.isfinite(other.value)]
    best = min(values) if figure.goal == "lower" else max(values)
    return figure.value == best and len(set(values)) > 1


def html_table(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of HTML cells that scrolls within itself where the screen is narrow."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, cells in rows
    )
    first = f'<th scope="col">{corner}</th>' if corner else "<td></td>"
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>'
        f"<thead><tr>{first}{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _event(event: LoggedEvent) -> str:
    mood = ' class="bad"' if is_bad(event) else ""
    name = f"<b>{escape(event.name)}</b>"
    return f"<li{mood}><span>step {event.step:,}</span> {name} <span>{escape(event.message)}</span></li>"
