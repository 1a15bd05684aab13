"""One chart as HTML: a caption with the last values to read, and the numbers, as JSON, that page.js draws."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kitforge.report.metrics import Series
from kitforge.report.number_format import number
from kitforge.report.thinning import is_noisy, smooth, thin

# Runs differ by colour and dash; the counts are coprime, so 40 runs all look different.
NUM_TONES, NUM_DASHES = 8, 5

_BUCKETS, _FEWEST_BUCKETS = 260, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A series of a chart. `run` and `tone` count from 0; points of an evaluation are drawn as dots."""

    label: str
    series: Series
    run: int
    tone: int
    is_evaluation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """An event, drawn at its step."""

    step: int
    label: str
    is_bad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The content of one chart."""

    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    marks: tuple[ChartMark, ...] = ()
    is_wide: bool = False
    axis: str = "step"  # unit of the horizontal axis
    may_be_log: bool = False


def draw(chart: Chart, steps: Sequence[int]) -> str:
    """The chart as an HTML figure whose horizontal axis holds all of `steps`."""
    buckets = max(_FEWEST_BUCKETS, _BUCKETS // max(1, len({line.run for line in chart.lines})))
    numbers = {
        "low": min(steps, default=0),
        "high": max(steps, default=1),
        "isSize": chart.axis != "step",
        "mayBeLog": chart.may_be_log,
        "lines": [_numbers(line, buckets) for line in chart.lines],
        "marks": [[mark.step, mark.label, mark.is_bad] for mark in chart.marks],
    }
    note = f" <small>{escape(chart.unit)}</small>" if chart.unit else ""
    has_key = len(chart.lines) > 1
    legend = "".join(_legend(line, has_key=has_key or line.is_evaluation) for line in chart.lines)
    axis, title = escape(chart.axis), escape(chart.title)
    return (
        f'<figure class="chart{" wide" if chart.is_wide else ""}" data-axis="{axis}" '
        f'data-chart="{escape(json.dumps(numbers, separators=(",", ":")))}">'
        f'<figcaption><h3>{title}{note}</h3><ul class="legend">{legend}</ul></figcaption>'
        '<div class="plot"><div class="y" aria-hidden="true"></div><div class="area">'
        f'<svg viewBox="0 0 2000 1000" preserveAspectRatio="none" role="img" aria-label="{title}"></svg>'
        f'<i class="cursor" hidden></i></div><div class="x" aria-hidden="true" data-axis="{axis}"></div></div></figure>'
    )


def _numbers(line: ChartLine, buckets: int) -> dict[str, Any]:
    """The points [step, value, trend] of a line; None is a value that is not finite, or no trend."""
    series, kept = line.series, thin(line.series, buckets)
    # Of the two points that share a bucket, one is enough for the smooth curve.
    smoothed = kept[:: 1 if len(kept) == len(series.values) else 2] if is_noisy(series) else []
    trend = dict(zip(smoothed, smooth(series.values, smoothed), strict=True))
    own = {"label": line.label, "run": line.run, "tone": _tone(line), "isEvaluation": line.is_evaluation}
    points = [
        [series.steps[index], _written(series.values[index]), *([_written(trend[index])] if index in trend else ())]
        for index in kept
    ]
    return own | {"hasTrend": not line.is_evaluation and bool(trend), "points": points}


def _written(value: float) -> float | None:
    """As JSON knows it, with as many digits as can be seen."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _tone(line: ChartLine) -> str:
    return f"tone-{line.tone} dash-{line.run % NUM_DASHES}"


def _legend(line: ChartLine, *, has_key: bool) -> str:
    """The name of a line beside its last value. A single curve needs no key: the title names it."""
    shape = '<path class="dots" d="M11 4h0"/>' if line.is_evaluation else '<path class="trend" d="M1 4h20"/>'
    num_gaps = sum(not math.isfinite(value) for value in line.series.values)
    gaps = f' <em class="bad">{num_gaps:,} not finite</em>' if num_gaps else ""
    swatch = f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{shape}</svg>'
    name = f"{swatch}<span>{escape(line.label)}</span> " if has_key else ""
    return f'<li class="{_tone(line)}" data-run="{line.run}">{name}<b>{number(line.series.values[-1])}</b>{gaps}</li>'
