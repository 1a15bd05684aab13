"""A policy learns from pairs beside the policy that it began as."""

import math
from pathlib import Path

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from tests.kits.rlhf import runs


def first_loss(stage: str, **choices: float) -> float:
    assembly = runs.begin(stage, None, choices, model=runs.network(torch.float64))
    task, model = assembly.loop.task, assembly.loop.model
    step = runs.first_step(task, model)
    return sum(task.loss(model, part)["loss"].item() for part in step) / float(task.count(step)["loss"])


def test_before_the_first_update_dpo_is_at_chance_and_ipo_at_its_distance() -> None:
    assert first_loss("dpo") == pytest.approx(math.log(2), abs=1e-10)
    assert first_loss("ipo", **{"preference.beta": 0.2}) == pytest.approx(1 / (2 * 0.2) ** 2, abs=1e-10)


@pytest.mark.parametrize("stage", ["dpo", "ipo", "orpo", "simpo"])
def test_preferred_answers_become_likelier_than_the_others(stage: str) -> None:
    metrics = runs.finish(runs.begin(stage, None, {"trainer.max_steps": 25}))
    assert metrics["eval/rewards/accuracy"] == 1.0
    assert metrics["eval/rewards/margins"] > 0.1


@pytest.mark.parametrize("stage", ["dpo", "simpo"])
def test_the_policy_that_was_given_stays_as_it_was(stage: str) -> None:
    policy = runs.network()
    before = [each.clone() for each in policy.parameters()]
    assembly = runs.begin(stage, None, model=policy)
    runs.finish(assembly)
    assert assembly.loop.model is not policy
    assert all(torch.equal(each, old) for each, old in zip(policy.parameters(), before, strict=True))


def test_a_reference_of_its_own_may_be_given_and_is_remembered(tmp_path: Path) -> None:
    other = runs.network()
    with torch.no_grad():
        next(iter(other.parameters())).add_(0.1)
    apart = runs.begin("dpo", None, roles={"reference": other})
    own = runs.begin("dpo")
    with pytest.raises(ConfigError, match="reference"):
        own.loop.task.load_state(apart.loop.task.state())


def test_smoothed_labels_belong_to_dpo() -> None:
    with pytest.raises(ConfigError, match="label_smoothing"):
        runs.begin("ipo", None, {"preference.label_smoothing": 0.1})
