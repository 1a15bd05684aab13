from __future__ import annotations

import json

import pytest

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.kl_controllers import KlControllerOptions, kl_controller

ADAPTIVE = KlControllerOptions(kind="adaptive", coef=0.1, target=6.0, horizon=1000)


@pytest.mark.parametrize(("nats", "factor"), [(0.0, 0.98), (5.7, 0.995), (6.0, 1.0), (6.3, 1.005), (600.0, 1.02)])
def test_a_step_moves_the_coefficient_by_the_held_relative_error(nats: float, factor: float) -> None:
    held = kl_controller(ADAPTIVE)
    held.update(nats, num_sequences=100)
    assert held.coef == pytest.approx(0.1 * factor, abs=1e-12)


def test_a_fixed_one_never_moves() -> None:
    fixed = kl_controller(KlControllerOptions(coef=0.1))
    fixed.update(600.0, 100)
    assert fixed.coef == 0.1
    assert fixed.state() == {}


def test_it_settles_where_the_divergence_is_the_target() -> None:
    held = kl_controller(ADAPTIVE)
    for _ in range(3000):
        # A policy that is drawn back the more, the dearer a nat is.
        held.update(0.9 / held.coef, num_sequences=50)
    assert 0.9 / held.coef == pytest.approx(6.0, rel=1e-3)


def test_a_step_of_more_sequences_than_the_horizon_never_rewards_divergence() -> None:
    held = kl_controller(ADAPTIVE)
    held.update(0.0, num_sequences=10**6)
    assert held.coef == 0.0


def test_it_goes_on_where_its_state_was_saved() -> None:
    went_on, resumed = kl_controller(ADAPTIVE), kl_controller(ADAPTIVE)
    went_on.update(9.0, 100)
    resumed.load_state(json.loads(json.dumps(went_on.state())))
    for each in (went_on, resumed):
        each.update(1.0, 64)
    assert resumed.coef == went_on.coef


@pytest.mark.parametrize("wrong", [{"coef": -1.0}, {"target": 0.0}, {"horizon": 0}])
def test_options_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="kl"):
        KlControllerOptions(**wrong)  # type: ignore[arg-type]
