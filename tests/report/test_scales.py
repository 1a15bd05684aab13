"""The arithmetic under the curves."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.report.metrics import Series
from kitforge.report.scales import Scale, is_noisy, smooth, step_scale, thin, value_scale

FINITE = st.floats(allow_nan=False, allow_infinity=False)
DRAWABLE = st.one_of(st.floats(1e-280, 1e290), st.floats(-1e290, -1e-280), st.integers(-9, 9).map(float))


def series_of(values: list[float]) -> Series:
    return Series(steps=tuple(range(len(values))), values=tuple(values))


@given(st.lists(DRAWABLE, min_size=1, max_size=8), st.booleans())
def test_an_axis_holds_its_values_in_order(values, may_be_log) -> None:
    scale = value_scale(values, may_be_log=may_be_log)
    assert scale.low <= min(values) and max(values) <= scale.high
    places = [scale.position(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)


def test_the_drawing_ends_at_the_axis() -> None:
    scale = Scale(low=1.0, high=3.0)
    assert [scale.position(value) for value in (-1e308, 1.0, 2.0, 3.0, 1e308)] == [0, 0, 0.5, 1, 1]


@given(st.lists(FINITE, min_size=1, max_size=8), st.booleans())
def test_ticks_are_few_rising_and_on_the_axis(values, may_be_log) -> None:
    scale = value_scale(values, may_be_log=may_be_log)
    ticks = scale.ticks(5)
    assert len(ticks) <= 9
    assert ticks == sorted(ticks)
    air = (scale.high - scale.low) * 1e-6
    assert all(scale.low - air <= tick <= scale.high + air for tick in ticks)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (Scale(low=0, high=10), [0, 2, 4, 6, 8, 10]),
        (Scale(low=0.13, high=0.61), [0.2, 0.3, 0.4, 0.5, 0.6]),
        (Scale(low=0.9, high=1100, is_log=True), [1, 10, 100, 1000]),
        (Scale(low=0.4, high=6, is_log=True), [0.5, 1, 2, 5]),
    ],
)
def test_ticks_are_round(scale, expected) -> None:
    assert scale.ticks(5) == pytest.approx(expected)


def test_a_wide_range_of_positive_values_is_logarithmic_where_that_is_allowed() -> None:
    assert value_scale([0.01, 10.0], may_be_log=True).is_log
    assert not value_scale([0.01, 10.0], may_be_log=False).is_log
    assert not value_scale([0.0, 10.0], may_be_log=True).is_log
    assert not value_scale([2.0, 10.0], may_be_log=True).is_log


@pytest.mark.parametrize("steps", [[], [0], [7], [1, 9]])
def test_an_axis_of_steps_has_an_extent(steps) -> None:
    scale = step_scale(steps)
    assert scale.low < scale.high
    assert all(0 <= scale.position(step) <= 1 for step in steps)


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(10_000)]
    values[1234], values[8765] = 50.0, -50.0
    groups = thin(series_of(values), step_scale([0, 9_999]), 200)
    kept = [index for group in groups for index in group.kept]
    assert {1234, 8765} <= set(kept)
    assert kept == sorted(kept)
    assert len(kept) <= 2 * 201


def test_a_short_series_is_kept_whole() -> None:
    groups = thin(series_of([3.0, 1.0, 2.0]), step_scale([0, 2]), 200)
    assert [group.kept for group in groups] == [(0,), (1,), (2,)]


def test_the_line_ends_at_a_value_that_is_not_finite() -> None:
    groups = thin(series_of([1.0, math.nan, 2.0]), step_scale([0, 2]), 200)
    assert [group.ends for group in groups] == [False, True, True]
    assert [group.gap for group in groups] == [None, 1, None]


def test_a_value_that_is_not_finite_survives_thinning() -> None:
    values = [1.0] * 10_000
    values[5_000] = math.inf
    groups = thin(series_of(values), step_scale([0, 9_999]), 100)
    assert [group.gap for group in groups if group.gap is not None] == [5_000]


def test_the_line_ends_where_the_run_went_back() -> None:
    series = Series(steps=(1, 2, 3, 2, 3), values=(1.0,) * 5)
    assert [group.ends for group in thin(series, step_scale([1, 3]), 200)] == [False, False, True, False, True]


def test_smoothing_keeps_a_straight_line_as_it_is() -> None:
    values = [3.0 * place - 7 for place in range(100)]
    assert smooth(values, range(100)) == pytest.approx(values)


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    values = [2.0] * 40 + [math.nan, math.inf] + [2.0] * 40
    assert smooth(values, range(82)) == pytest.approx([2.0] * 82)


def test_smoothing_holds_the_largest_of_numbers() -> None:
    assert all(math.isfinite(mean) for mean in smooth([1.7e308, -1.7e308] * 20, range(40)))


@given(st.lists(DRAWABLE, min_size=1, max_size=60))
def test_smoothing_never_leaves_the_range_of_the_values(values) -> None:
    assert all(min(values) <= mean <= max(values) for mean in smooth(values, range(len(values))))


def test_a_schedule_is_no_noise_but_a_loss_is() -> None:
    chance = random.Random(0)
    schedule = [min(1.0, place / 20) * math.cos(place / 130) for place in range(200)]
    loss = [3 * math.exp(-place / 50) + chance.gauss(0, 0.1) for place in range(200)]
    assert not is_noisy(series_of(schedule))
    assert is_noisy(series_of(loss))
