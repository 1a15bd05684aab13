"""Which points of a series are drawn, and the trend under its noise."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.report.metrics import Series
from kitforge.report.thinning import is_noisy, smooth, thin

DRAWABLE = st.one_of(st.floats(1e-280, 1e290), st.floats(-1e290, -1e-280), st.integers(-9, 9).map(float))


def series_of(values: list[float]) -> Series:
    return Series(steps=tuple(range(len(values))), values=tuple(values))


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(10_000)]
    values[1234], values[8765] = 50.0, -50.0
    kept = thin(series_of(values), 200)
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert kept == sorted(kept)
    assert len(kept) <= 2 * 201


def test_a_short_series_is_kept_whole() -> None:
    assert thin(series_of([3.0, math.nan, 2.0]), 200) == [0, 1, 2]
    assert thin(series_of([]), 200) == []


def test_a_value_that_is_not_finite_survives_thinning() -> None:
    values = [1.0] * 10_000
    values[5_000] = math.inf
    assert [index for index in thin(series_of(values), 100) if not math.isfinite(values[index])] == [5_000]


def test_smoothing_keeps_a_straight_line_as_it_is() -> None:
    values = [3.0 * place - 7 for place in range(100)]
    assert smooth(values, range(100)) == pytest.approx(values)


def test_smoothing_is_the_mean_of_as_many_neighbours_on_both_sides() -> None:
    chance = random.Random(0)
    values = [chance.gauss(0, 1) for _ in range(400)]
    means = [sum(values[place - 8 : place + 9]) / 17 for place in range(8, 392)]
    assert smooth(values, range(8, 392)) == pytest.approx(means)


def test_smoothing_leaves_out_what_is_not_finite() -> None:
    values = [2.0] * 40 + [math.nan, math.inf] + [2.0] * 40
    assert smooth(values, range(82)) == pytest.approx([2.0] * 82)


def test_smoothing_holds_the_largest_of_numbers() -> None:
    assert all(math.isfinite(mean) for mean in smooth([1.7e308, -1.7e308] * 20, range(40)))


@given(st.lists(DRAWABLE, min_size=1, max_size=60))
def test_smoothing_never_leaves_the_range_of_the_values(values) -> None:
    assert all(min(values) <= mean <= max(values) for mean in smooth(values, range(len(values))))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_schedule_is_no_noise_but_a_loss_is(scale: float) -> None:
    chance = random.Random(0)
    schedule = [scale * min(1.0, place / 20) * math.cos(place / 130) for place in range(200)]
    loss = [scale * (3 * math.exp(-place / 50) + chance.gauss(0, 0.1)) for place in range(200)]
    assert not is_noisy(series_of(schedule))
    assert is_noisy(series_of(loss))
