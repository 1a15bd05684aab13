"""Answers drawn ahead are those of the policy that the rule names, count as much as they should, and survive a kill."""

import json
from pathlib import Path
from typing import Any, cast, final

import pytest
import torch
from torch import nn

from kitforge.kits.network_source import copy_model
from kitforge.kits.rlhf.reinforcement.async_rollouts import AsyncRollouts
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout, pad_rollouts, target_logprobs
from kitforge.kits.rlhf.roles.value_head import policy_of
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.kits.rlhf import runs
from tests.trainer import tiny

CHOICES: dict[str, Any] = {
    "rl.old_logprobs": "recompute",
    "importance_sampling.mode": "truncate",
    "importance_sampling.max": 1.5,
    "trainer.max_steps": 4,
    "rollout.max_staleness": 2,
}


@final
class Watched(Callback):
    """Keeps the policy at the end of each step, and the answers that it was trained on."""

    def __init__(self) -> None:
        self.policies: list[nn.Module] = []
        self.rounds: list[list[Rollout]] = []
        self.task: PolicyGradientTask | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind in ("start", "step"):
            self.policies.append(copy_model(policy_of(run.model), torch.device("cpu")))
        if event.kind == "step":
            assert self.task is not None and self.task.collected is not None
            self.rounds.append(self.task.collected[1])


def trained(staleness: int) -> Watched:
    watched = Watched()
    choices = CHOICES | {"rollout.max_staleness": staleness}
    assembly = runs.begin("ppo", None, choices, model=runs.network(torch.float64), callbacks=[watched])
    watched.task = cast(PolicyGradientTask, assembly.loop.task)
    runs.finish(assembly)
    return watched


def furthest(policy: nn.Module, answers: list[Rollout], name: str) -> float:
    """How far the numbers of the answers are from the policy's own."""
    batch = pad_rollouts(answers, 0)
    with torch.no_grad():
        found, _ = target_logprobs(policy, batch["tokens"], batch["targets"], 1.0)
    rows = [row[mask] for row, mask in zip(found, batch["targets"] >= 0, strict=True)]
    return max(
        float((row - torch.tensor(getattr(each, name), dtype=torch.float64)).abs().max())
        for row, each in zip(rows, answers, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_answers_are_those_of_the_policy_of_so_many_rounds_ago(staleness: int) -> None:
    found = trained(staleness)
    for number, answers in enumerate(found.rounds):
        drawn_by = max(0, number - staleness)
        assert furthest(found.policies[drawn_by], answers, "logprobs") < 1e-10
        assert furthest(found.policies[number], answers, "old_logprobs") < 1e-10
        if drawn_by < number:
            assert furthest(found.policies[number], answers, "logprobs") > 1e-4


def test_what_an_older_policy_wrote_is_weighed_by_how_likely_it_is_now() -> None:
    assembly = runs.begin("ppo", None, CHOICES | {"rollout.max_staleness": 1}, model=runs.network(torch.float64))
    task = cast(PolicyGradientTask, assembly.loop.task)
    runs.finish(assembly)
    whole = task._batch
    assert whole is not None and task.collected is not None
    for row, each in enumerate(task.collected[1]):
        old, drawn = (torch.tensor(values, dtype=torch.float64) for values in (each.old_logprobs, each.logprobs))
        ratios = (old - drawn).exp().clamp(max=1.5)
        torch.testing.assert_close(whole.importance_weights[row][whole.mask[row]], ratios)
    assert float((whole.importance_weights[whole.mask] - 1).abs().max()) > 1e-4


@pytest.mark.slow
def test_a_run_that_draws_ahead_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = CHOICES | {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 9, "rl.epochs": 2}
    choices["trainer.max_steps"] = 8
    runs.finish(runs.begin("ppo", tmp_path / "whole", choices))
    for killed in (1, 4):
        folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / f"killed_{killed}", killed)
        runs.finish(runs.begin("ppo", folder, choices | {"resume": "auto"}))
        tiny.assert_same(folder, tmp_path / "whole")
    # What there is for each token is no JSON.
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step_4" / "state.json").read_text())
    for ahead in state["task"]["ahead"].values():
        assert not {"prompt_tokens", "tokens", "logprobs"} & set(ahead["rows"][0])
        assert "state_tensor" in ahead["tensors"]["logprobs"]["values"]
    # Rounds to come that a checkpoint forgot would be drawn by another policy.
    monkeypatch.setattr(AsyncRollouts, "restore", lambda ahead, rounds: None)
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "forgotten", 4)
    runs.finish(runs.begin("ppo", folder, choices | {"resume": "auto"}))
    with pytest.raises(AssertionError):
        tiny.assert_same(folder, tmp_path / "whole")


def test_what_fails_in_a_reward_function_is_told_where_it_is_waited_for() -> None:
    def broken(*, completions: list[str]) -> list[float]:
        raise ValueError("no scores today")

    with pytest.raises(Exception, match="broken.*failed"):
        runs.finish(runs.begin("ppo", None, CHOICES, roles={"reward": broken}))
