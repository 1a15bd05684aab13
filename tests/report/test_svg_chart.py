"""One chart as HTML."""

import math
import re
from xml.etree import ElementTree

import pytest

from kitforge.report.metrics import Series
from kitforge.report.scales import step_scale
from kitforge.report.svg_chart import Chart, ChartLine, ChartMark, draw


def line_of(values: list[float], *, run: int = 0, label: str = "training", is_evaluation: bool = False) -> ChartLine:
    series = Series(steps=tuple(range(len(values))), values=tuple(values))
    return ChartLine(label=label, series=series, run=run, tone=run, is_evaluation=is_evaluation)


def drawn(*lines: ChartLine, title: str = "Loss", marks: tuple[ChartMark, ...] = ()) -> str:
    last = max(len(line.series.steps) for line in lines) - 1
    return draw(Chart(title=title, unit="", lines=lines, marks=marks), step_scale([0, last]), "chart-0")


def path_of(html: str, kind: str) -> str:
    found = re.search(rf'<path class="{kind}" d="([^"]*)"', html.partition('<svg viewBox="0 0 2000')[2])
    assert found
    return found[1]


def test_the_chart_is_well_formed_and_tells_itself_to_a_screen_reader() -> None:
    html = drawn(line_of([4.0, 2.0, 3.0]))
    svg = ElementTree.fromstring(re.search(r"<svg viewBox=.*?</svg>", html)[0])
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-labelledby"].split() == [svg[0].attrib["id"], svg[1].attrib["id"]]
    assert svg[0].text == "Loss"
    assert svg[1].text == "training: from 4 at step 0 to 3 at step 2, lowest 2 at step 1, highest 4 at step 0."


def test_a_curve_goes_through_its_points() -> None:
    assert path_of(drawn(line_of([0.0, 10.0, 0.0])), "trend") == "M0 1000 1000 48 2000 1000"


def test_a_gap_breaks_the_curve_and_is_marked() -> None:
    html = drawn(line_of([1.0, 2.0, math.nan, 2.0, 1.0]))
    assert path_of(html, "trend").count("M") == 2
    assert path_of(html, "gap") == "M1000 0v40"
    assert "1 not finite" in html
    assert "not finite" not in drawn(line_of([1.0, 2.0]))


def test_a_gap_at_the_very_start_is_marked() -> None:
    assert path_of(drawn(line_of([math.nan, 2.0, 1.0])), "gap") == "M0 0v40"


def test_the_read_out_holds_every_value_and_gap() -> None:
    assert 'data-points="0 2;1 not finite;2 1.5"' in drawn(line_of([2.0, math.inf, 1.5]))


def test_a_point_between_two_gaps_is_still_seen() -> None:
    assert "h0" in path_of(drawn(line_of([math.nan, 2.0, math.nan])), "trend")


def test_noise_is_drawn_light_under_a_smooth_curve() -> None:
    html = drawn(line_of([1.0 + place % 2 for place in range(100)]))
    assert path_of(html, "raw") != path_of(html, "trend")


def test_evaluations_are_dots() -> None:
    assert path_of(drawn(line_of([1.0, 2.0], is_evaluation=True)), "dots").count("h0") == 2


def test_runs_differ_in_colour_and_in_dash() -> None:
    html = drawn(line_of([1.0, 2.0]), line_of([2.0, 1.0], run=1))
    assert 'class="tone-0 dash-0" data-run="0"' in html
    assert 'class="tone-1 dash-1" data-run="1"' in html


def test_events_are_marked_at_their_step() -> None:
    html = drawn(line_of([1.0, 2.0, 3.0]), marks=(ChartMark(step=1, label="skipped at step 1", is_bad=True),))
    assert '<path class="mark bad" d="M1000 0v1000"><title>skipped at step 1</title>' in html


@pytest.mark.parametrize("values", [[math.nan], [0.0], [5.0] * 3, [-1e308, 1e308], [5e-324], [1e-300, 1e300]])
def test_odd_values_are_drawn_within_the_frame(values) -> None:
    html = draw(Chart(title="x", unit="", lines=(line_of(values),), may_be_log=True), step_scale(range(3)), "k")
    places = [int(place) for place in re.findall(r"-?\d+", path_of(html, "trend")) if place != "0"]
    assert all(0 <= place <= 2000 for place in places)


def test_labels_are_escaped() -> None:
    html = drawn(line_of([1.0], label="<b>&"), line_of([1.0], run=1), title="<script>")
    assert "<script>" not in html and "<b>&" not in html
    assert "&lt;script&gt;" in html
