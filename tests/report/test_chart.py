"""One chart: what the page is given, and what a browser draws of it."""

import math
import re
from html import unescape
from pathlib import Path

import pytest

from kitforge.report.chart import Chart, ChartLine, ChartMark, draw
from kitforge.report.metrics import Series
from kitforge.report.page import document
from tests.report.test_browser import WIDE, browser, open_page

__all__ = ["browser"]


def line_of(values: list[float], *, run: int = 0, label: str = "training", is_evaluation: bool = False) -> ChartLine:
    series = Series(steps=tuple(range(len(values))), values=tuple(values))
    return ChartLine(label=label, series=series, run=run, tone=run, is_evaluation=is_evaluation)


def figure(*lines: ChartLine, title: str = "Loss", may_be_log: bool = False, marks: tuple[ChartMark, ...] = ()) -> str:
    last = max(len(line.series.steps) for line in lines) - 1
    return draw(Chart(title=title, unit="", lines=lines, marks=marks, may_be_log=may_be_log), [0, last])


def sizes(*points: tuple[int, float], axis: str = "rows") -> str:
    series = Series(steps=tuple(size for size, _ in points), values=tuple(value for _, value in points))
    line = ChartLine(label="LRU", series=series, run=0, tone=0)
    return draw(Chart(title="Hit rate", unit="", lines=(line,), axis=axis), series.steps)


RISING = [1.0, 2.0]
SKIPPED = (ChartMark(step=1, label="<skipped>", is_bad=True),)
ODD = [[math.nan], [0.0], [5.0] * 3, [-1e308, 1e308], [5e-324], [1e-300, 1e300]]
CHARTS = {
    "words": figure(line_of([4.0, 2.0, 3.0])),
    "curve": figure(line_of([0.0, 10.0, 0.0])),
    "gap": figure(line_of([1.0, 2.0, math.nan, 2.0, 1.0])),
    "gap at the start": figure(line_of([math.nan, 2.0, 1.0])),
    "alone": figure(line_of([math.nan, 2.0, math.nan])),
    "back": sizes((1, 1.0), (2, 2.0), (3, 1.0), (2, 2.0), (3, 2.0), axis="step"),
    "noise": figure(line_of([1.0 + place % 2 for place in range(100)])),
    "dots": figure(line_of(RISING, is_evaluation=True)),
    "runs": figure(line_of(RISING), line_of([2.0, 1.0], run=1)),
    "event": figure(line_of([1.0, 2.0, 3.0]), marks=SKIPPED),
    "far from zero": figure(line_of([3.02, 3.5])),
    "ten": figure(line_of([0.0, 10.0])),
    "thousands": figure(line_of([0.0, 40_000.0])),
    "small": figure(line_of([0.0, 2e-4])),
    "wide": figure(line_of([1.0, 1000.0]), may_be_log=True),
    "wide but even": figure(line_of([1.0, 1000.0])),
    "wide from zero": figure(line_of([0.0, 1000.0]), may_be_log=True),
    "narrow": figure(line_of([0.5, 5.0]), may_be_log=True),
    "sizes": sizes((10, 0.2), (100, 0.5), (10_000, 0.9)),
    "few sizes": sizes((10, 0.2), (100, 0.9)),
} | {f"odd {place}": figure(line_of(values), may_be_log=True) for place, values in enumerate(ODD)}


@pytest.fixture(scope="module")
def drawn(browser: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All charts as one browser draws them."""
    page = tmp_path_factory.mktemp("charts") / "page.html"
    Path(page).write_text(document("Charts", "Kitforge report", "".join(CHARTS.values())), "utf-8")
    dump, console = open_page(browser, page, WIDE, "--dump-dom")
    assert console == []
    return dict(zip(CHARTS, re.findall("<figure.*?</figure>", dump, re.DOTALL), strict=True))


def paths(html: str, kind: str) -> list[str]:
    return re.findall(rf'<path class="{kind}" d="([^"]*)"', html.partition('<div class="plot">')[2])


def axis_of(html: str, side: str) -> list[str]:
    part = html.partition(f'<div class="{side}"')[2].partition("</div>")[0]
    return re.findall("<span[^>]*>([^<]*)</span>", part)


@pytest.mark.slow
def test_the_chart_tells_itself_to_a_screen_reader(drawn) -> None:
    assert 'role="img" aria-label="Loss"' in drawn["words"]
    words = "training: from 4 at step 0 to 3 at step 2, lowest 2 at step 1, highest 4 at step 0."
    assert f"<desc>{words}</desc>" in drawn["words"]


@pytest.mark.slow
def test_a_curve_goes_through_its_points(drawn) -> None:
    assert paths(drawn["curve"], "trend") == ["M0 1000 1000 48 2000 1000"]


@pytest.mark.slow
def test_a_value_that_is_not_finite_breaks_the_curve_and_is_marked(drawn) -> None:
    assert paths(drawn["gap"], "trend")[0].count("M") == 2
    assert paths(drawn["gap"], "gap") == ["M1000 0v40"]
    assert paths(drawn["gap at the start"], "gap") == ["M0 0v40"]
    assert "h0" in paths(drawn["alone"], "trend")[0]
    assert paths(drawn["curve"], "gap") == []


@pytest.mark.slow
def test_the_curve_ends_where_the_run_went_back(drawn) -> None:
    assert paths(drawn["back"], "trend")[0].count("M") == 2


@pytest.mark.slow
def test_noise_is_drawn_light_under_a_smooth_curve(drawn) -> None:
    assert paths(drawn["noise"], "raw") != paths(drawn["noise"], "trend")
    assert paths(drawn["curve"], "raw") == []


@pytest.mark.slow
def test_evaluations_are_dots_and_runs_differ_in_colour_and_dash(drawn) -> None:
    assert paths(drawn["dots"], "dots")[0].count("h0") == 2
    for run in (0, 1):
        assert f'<g class="tone-{run} dash-{run}" data-run="{run}">' in drawn["runs"]


@pytest.mark.slow
def test_events_are_marked_at_their_step(drawn) -> None:
    assert '<path class="mark bad" d="M1000 0v1000"><title>&lt;skipped&gt;</title>' in drawn["event"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chart", "side", "expected"),
    [
        ("ten", "y", "0 2 4 6 8 10"),
        ("far from zero", "y", "3.0 3.1 3.2 3.3 3.4 3.5"),
        ("thousands", "y", "0 10k 20k 30k 40k"),
        ("small", "y", "0 0.5e-4 1.0e-4 1.5e-4 2.0e-4"),
        ("wide", "y", "1 10 100 1,000"),
        ("wide but even", "y", "0 200 400 600 800 1000"),
        ("wide from zero", "y", "0 200 400 600 800 1000"),
        ("narrow", "y", "0 1 2 3 4 5"),
        ("curve", "x", "0 1 2"),
        ("sizes", "x", "10 100 1,000 10,000"),
        ("few sizes", "x", "20 40 60 80 100"),
    ],
)
def test_ticks_are_round_and_share_their_form(drawn, chart: str, side: str, expected: str) -> None:
    assert axis_of(drawn[chart], side) == expected.split()
    assert ("logarithmic" in drawn[chart]) == (chart == "wide")


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(ODD)))
def test_odd_values_are_drawn_within_the_frame(drawn, place: int) -> None:
    found = [int(each) for each in re.findall(r"-?\d+", paths(drawn[f"odd {place}"], "trend")[0])]
    assert all(0 <= each <= 2000 for each in found)
    assert "NaN" not in drawn[f"odd {place}"]
    assert axis_of(drawn[f"odd {place}"], "y")


def test_the_last_values_stand_in_the_page_without_a_browser() -> None:
    html = figure(line_of([1.0, math.inf, 2.5], label="one"), line_of([3.0], run=1, label="two"))
    assert re.findall("<span>(one|two)</span> <b>(.*?)</b>(.*?)</li>", html) == [
        ("one", "2.5", ' <em class="bad">1 not finite</em>'),
        ("two", "3", ""),
    ]


def test_labels_are_escaped() -> None:
    html = figure(line_of([1.0], label="<b>&\"'"), line_of([1.0], run=1), title="<script>\"'", marks=SKIPPED)
    assert "<script>" not in html and "<b>&" not in html and "<skipped>" not in html
    assert "&lt;script&gt;" in html
    found = re.search('data-chart="([^"]*)"', html)
    assert found is not None and '"<b>&\\"\'"' in unescape(found[1])
