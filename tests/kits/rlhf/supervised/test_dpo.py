"""A policy learns from pairs beside the policy that it began as."""

from pathlib import Path

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from tests.kits.rlhf import runs


@pytest.mark.parametrize("stage", ["dpo", "orpo"])
def test_preferred_answers_become_likelier_than_the_others(stage: str) -> None:
    metrics = runs.finish(runs.begin(stage, None, {"trainer.max_steps": 25}))
    assert metrics["eval/rewards/accuracy"] == 1.0
    assert metrics["eval/rewards/margins"] > 0.1


@pytest.mark.parametrize("stage", ["dpo", "simpo", "reward"])
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
