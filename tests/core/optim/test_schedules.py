"""The course of the learning rate."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.core.optim.schedules import Plateau, ScheduleConfig, lr_scale
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import CheckpointError, ConfigError

NAMES = ["constant", "linear", "cosine", "wsd", "plateau"]


def config(**values: Any) -> ScheduleConfig:
    return from_dict(ScheduleConfig, values, "schedule")


def course(max_steps: int, **values: Any) -> list[float]:
    return [lr_scale(config(**values), step, max_steps) for step in range(max_steps)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Two warmup steps, peak at step 1, last step 5.
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("plateau", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1, 0.2 + 0.8 * (2 + math.sqrt(2)) / 4, 0.6, 0.2 + 0.8 * (2 - math.sqrt(2)) / 4, 0.2]),
        # round(0.3 * 6) = 2 steps of decay.
        ("wsd", [0.5, 1, 1, 1, 0.6, 0.2]),
    ],
)
def test_values_computed_by_hand(name: str, expected: list[float]) -> None:
    got = course(6, name=name, warmup_steps=2, final_fraction=0.2, decay_fraction=0.3)
    assert got == pytest.approx(expected, rel=1e-12)


def test_warmup_as_a_fraction_is_rounded_to_steps() -> None:
    assert course(100, name="constant", warmup_steps=0.29)[27:30] == [28 / 29, 1.0, 1.0]


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert course(5, name="linear", warmup_steps=0)[0] == 1.0


def test_steps_after_the_last_keep_its_scale() -> None:
    for name in NAMES:
        chosen = config(name=name, warmup_steps=3)
        assert lr_scale(chosen, 10_000, 10) == lr_scale(chosen, 9, 10)


def test_a_run_of_nothing_but_warmup_ends_at_the_peak() -> None:
    for name in NAMES:
        assert course(4, name=name, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps.*\n.*101\n.*at most the 100 steps"):
        lr_scale(config(warmup_steps=101), 0, 100)


@given(
    name=st.sampled_from(NAMES),
    max_steps=st.integers(1, 100),
    fractions=st.tuples(st.floats(0, 1, exclude_max=True), *[st.floats(0, 1)] * 2),
)
def test_every_course_rises_then_falls_to_the_final_fraction(
    name: str, max_steps: int, fractions: tuple[float, float, float]
) -> None:
    warmup_fraction, decay_fraction, final_fraction = fractions
    values = course(
        max_steps,
        name=name,
        warmup_steps=warmup_fraction,
        decay_fraction=decay_fraction,
        final_fraction=final_fraction,
    )
    warmup = round(warmup_fraction * max_steps)
    assert all(0 <= value <= 1 for value in values)
    assert values[0] > 0 or final_fraction == 0
    assert max(values) == 1.0
    assert all(late > early for early, late in zip(values[: warmup - 1], values[1:warmup], strict=False))
    falling = values[max(warmup - 1, 0) :]
    assert all(late <= early for early, late in zip(falling, falling[1:], strict=False))
    decays = name in ("linear", "cosine") or (name == "wsd" and round(decay_fraction * max_steps) > 0)
    assert values[-1] == (final_fraction if decays and len(falling) > 1 else 1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"warmup_steps": math.inf},
        {"warmup_steps": math.nan},
        {"decay_fraction": -0.1},
        {"final_fraction": math.nan},
        {"plateau_patience": 0},
        {"name": "cosin"},
    ],
)
def test_a_value_out_of_range_is_refused_by_its_option(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"schedule.{next(iter(values))}"):
        config(**values)


def plateau(**values: Any) -> Plateau:
    return Plateau(config(name="plateau", **values))


def test_plateau_halves_after_so_many_stale_observations_in_a_row() -> None:
    schedule = plateau(plateau_patience=2)
    assert [schedule.observe(value) for value in [3, 3, 2, 2, 2, 2, 2]] == [1, 1, 1, 1, 0.5, 0.5, 0.25]


def test_plateau_counts_a_fall_within_the_threshold_as_none() -> None:
    schedule = plateau(plateau_patience=1)
    assert [schedule.observe(value) for value in [1.0, 0.9995, 0.9989]] == [1.0, 0.5, 0.5]


def test_plateau_knows_that_a_negative_value_falls() -> None:
    schedule = plateau(plateau_patience=1)
    assert [schedule.observe(value) for value in [-1.0, -1.1, -1.1]] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_plateau_takes_what_is_not_finite_for_stale(value: float) -> None:
    schedule = plateau(plateau_patience=1)
    assert [schedule.observe(each) for each in [value, 5.0, value, 4.0]] == [0.5, 0.5, 0.25, 0.25]


def test_plateau_never_falls_below_the_final_fraction() -> None:
    schedule = plateau(plateau_patience=1, final_fraction=0.3)
    assert [schedule.observe(1.0) for _ in range(4)] == [1.0, 0.5, 0.3, 0.3]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.integers(0, 20))
def test_plateau_resumed_anywhere_equals_one_never_stopped(values: list[float], cut: int) -> None:
    whole, first, second = plateau(), plateau(), plateau()
    expected = [whole.observe(value) for value in values]
    got = [first.observe(value) for value in values[:cut]]
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.factor == first.factor
    assert got + [second.observe(value) for value in values[cut:]] == expected


def test_plateau_refuses_a_foreign_state() -> None:
    with pytest.raises(CheckpointError, match="plateau"):
        plateau().load_state({"best": 1.0})
