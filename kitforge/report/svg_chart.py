"""One chart as HTML: an SVG of the curves, axis labels, and a legend with the last values.

The drawing stretches to the available space with constant stroke widths; the labels are HTML text beside it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from operator import itemgetter

from kitforge.report.metrics import Series
from kitforge.report.number_format import number, tick_labels
from kitforge.report.scales import Group, Scale, is_noisy, smooth, thin, value_scale

# Runs differ by colour and dash; the counts are coprime, so 40 runs all look different.
NUM_TONES, NUM_DASHES = 8, 5

# Units of the drawing, not pixels.
_WIDTH, _HEIGHT = 2000, 1000
_BUCKETS, _FEWEST_BUCKETS = 260, 80

_Point = tuple[int, int]
_Pick = Callable[[Group], list[tuple[int, float]]]


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


def draw(chart: Chart, steps: Scale, key: str) -> str:
    """The chart as an HTML figure over the axis `steps`; `key` is unique on the page."""
    values = [value for line in chart.lines for _, value in line.series.finite()]
    scale = value_scale(values, may_be_log=chart.may_be_log)
    buckets = max(_FEWEST_BUCKETS, _BUCKETS // max(1, len({line.run for line in chart.lines})))
    drawn = [_LineRenderer(line, steps, scale, buckets) for line in chart.lines]
    description = " ".join(_sentence(line, chart.axis) for line in chart.lines)
    unit = ", ".join(part for part in (chart.unit, "logarithmic" if scale.is_log else "") if part)
    note = f" <small>{escape(unit)}</small>" if unit else ""
    rows = "".join(f"M0 {round((1 - scale.position(tick)) * _HEIGHT)}h{_WIDTH}" for tick in scale.ticks(5))
    grid = f'<path class="grid" d="{rows}"/>'
    legend = "".join(line.legend(has_key=len(drawn) > 1 or line.line.is_evaluation) for line in drawn)
    return (
        f'<figure class="chart{" wide" if chart.is_wide else ""}" data-low="{steps.low}" data-high="{steps.high}" '
        f'data-axis="{escape(chart.axis)}"{" data-log" if steps.is_log else ""}>'
        f'<figcaption><h3>{escape(chart.title)}{note}</h3><ul class="legend">{legend}</ul></figcaption>'
        f'<div class="plot"><div class="y" aria-hidden="true">{_labels(scale, 5, "bottom")}</div><div class="area">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(chart.title)}</title><desc id="{key}-d">{escape(description)}</desc>'
        f"{grid}{_marks(chart.marks, steps)}{''.join(line.paths() for line in drawn)}</svg>"
        '<i class="cursor" hidden></i></div>'
        f'<div class="x" aria-hidden="true" data-axis="{escape(chart.axis)}">'
        f"{_labels(steps, 6, 'left')}</div></div></figure>"
    )


class _LineRenderer:
    """Draws one line on its two scales."""

    def __init__(self, line: ChartLine, steps: Scale, scale: Scale, buckets: int) -> None:
        self.line, self.steps, self.scale = line, steps, scale
        self.groups = thin(line.series, steps, buckets)
        self.has_trend = not line.is_evaluation and is_noisy(line.series)

    def paths(self) -> str:
        line = self.line
        body = self._evaluation() if line.is_evaluation else self._training()
        gaps = "".join(f"M{self._x(group.gap)} 0v40" for group in self.groups if group.gap is not None)
        if gaps:
            body += f'<path class="gap" d="{gaps}"><title>not finite</title></path>'
        return f'<g {self._attributes()} data-points="{escape(self._points())}">{body}</g>'

    def legend(self, *, has_key: bool) -> str:
        line, values = self.line, self.line.series.values
        shape = '<path class="dots" d="M11 4h0"/>' if line.is_evaluation else '<path class="trend" d="M1 4h20"/>'
        num_gaps = sum(not math.isfinite(value) for value in values)
        gaps = f' <em class="bad">{num_gaps:,} not finite</em>' if num_gaps else ""
        # A single curve needs no key: the title names it.
        swatch = f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">{shape}</svg>'
        name = f"{swatch}<span>{escape(line.label)}</span> " if has_key else ""
        return f"<li {self._attributes()}>{name}<b>{number(values[-1])}</b>{gaps}</li>"

    def _training(self) -> str:
        raw = _path(self._segments(self._extremes))
        if not self.has_trend:
            return f'<path class="trend" d="{raw}"/>'
        middles = [group.middle for group in self.groups]
        means = dict(zip(middles, smooth(self.line.series.values, middles), strict=True))
        trend = _path(self._segments(lambda group: [(group.middle, means[group.middle])] if group.kept else []))
        return f'<path class="raw" d="{raw}"/><path class="trend" d="{trend}"/>'

    def _evaluation(self) -> str:
        segments = self._segments(self._extremes)
        dots = "".join(f"M{x} {y}h0" for segment in segments for x, y in segment)
        return (
            f'<path class="raw" d="{_path(segments)}"/><path class="halo" d="{dots}"/><path class="dots" d="{dots}"/>'
        )

    def _extremes(self, group: Group) -> list[tuple[int, float]]:
        return [(index, self.line.series.values[index]) for index in group.kept]

    def _segments(self, pick: _Pick) -> list[list[_Point]]:
        """The picked points in screen coordinates, one list per unbroken piece of the line."""
        segments: list[list[_Point]] = [[]]
        for group in self.groups:
            segments[-1].extend((self._x(index), self._y(value)) for index, value in pick(group))
            if group.ends:
                segments.append([])
        return [segment for segment in segments if segment]

    def _points(self) -> str:
        """The data of the tooltip: "step value" pairs with formatted values."""
        series = self.line.series
        shown = sorted({index for group in self.groups for index in (*group.kept, group.gap) if index is not None})
        return ";".join(f"{series.steps[index]} {number(series.values[index])}" for index in shown)

    def _attributes(self) -> str:
        return f'class="tone-{self.line.tone} dash-{self.line.run % NUM_DASHES}" data-run="{self.line.run}"'

    def _x(self, index: int) -> int:
        return round(self.steps.position(self.line.series.steps[index]) * _WIDTH)

    def _y(self, value: float) -> int:
        return round((1 - self.scale.position(value)) * _HEIGHT)


def _path(segments: Iterable[list[_Point]]) -> str:
    """Polylines. A single point becomes a stroke of zero length, which round caps draw as a dot."""
    return "".join(
        f"M{' '.join(f'{x} {y}' for x, y in segment)}" if len(segment) > 1 else f"M{segment[0][0]} {segment[0][1]}h0"
        for segment in segments
    )


def _labels(scale: Scale, most: int, side: str) -> str:
    ticks = scale.ticks(most)
    if side == "left":
        # Steps are integers; a short run would otherwise get ticks at halves.
        ticks = [tick for tick in ticks if tick == int(tick) and scale.low <= tick <= scale.high]
    texts = [number(tick) for tick in ticks] if scale.is_log else tick_labels(ticks)
    return "".join(
        f'<span style="{side}:{scale.position(tick):.2%}">{text}</span>'
        for tick, text in zip(ticks, texts, strict=True)
    )


def _marks(marks: Iterable[ChartMark], steps: Scale) -> str:
    return "".join(
        f'<path class="mark{" bad" if mark.is_bad else ""}" '
        f'd="M{round(steps.position(mark.step) * _WIDTH)} 0v{_HEIGHT}">'
        f"<title>{escape(mark.label)}</title></path>"
        for mark in marks
    )


def _sentence(line: ChartLine, axis: str) -> str:
    """The curve in words, for screen readers."""
    points = line.series.finite()
    num_gaps = len(line.series.values) - len(points)
    gaps = f", {num_gaps:,} values not finite" if num_gaps else ""
    if not points:
        return f"{line.label}: no finite value{gaps}."
    lowest, highest = min(points, key=itemgetter(1)), max(points, key=itemgetter(1))
    ends = " to ".join(f"{number(value)} at {axis} {step:,}" for step, value in (points[0], points[-1]))
    extremes = ", ".join(
        f"{word} {number(value)} at {axis} {step:,}"
        for word, (step, value) in (("lowest", lowest), ("highest", highest))
    )
    return f"{line.label}: from {ends}, {extremes}{gaps}."
