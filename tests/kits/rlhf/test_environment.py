"""A policy that talks with a calculator: what it wrote is learnt as it wrote it, and nothing else is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kitforge.data.tokenizer import ByteTokenizer
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.types import MicroBatch
from kitforge.kits.rlhf import rollouts
from kitforge.kits.rlhf.actor_critic import policy_of
from kitforge.kits.rlhf.record import read_round
from kitforge.kits.rlhf.rl import RLTask
from kitforge.kits.rlhf.rollouts import Trajectory, token_log_probs
from tests.kits.rlhf import runs
from tests.trainer import tiny

ROWS = [{"prompt": f"{n}+{n % 3}= ", "numbers": [n, n % 3]} for n in range(12)]
CHOICES = {
    "rl.prompts_per_step": 4,
    "rollout.max_new_tokens": 6,
    "rollout.max_turns": 3,
    "data.sequence_length": 64,
    "kl.controller.coefficient": 0.0,
    "rl.whiten_advantages": False,
    "rl.discount": 1.0,
    "rl.trace": 1.0,
}


class Calculator:
    """Says whether a digit of the sum was said, and what the sum is; the second answer is the last one."""

    played: list[Calculator] = []

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.told: list[str] = []
        Calculator.played.append(self)

    def reset(self, row: Mapping[str, Any]) -> str:
        self.sum = sum(row["numbers"])
        self.told.append("go: ")
        return self.told[-1]

    def step(self, response: str) -> tuple[str, float, bool]:
        self.heard.append(response)
        self.told.append(f" no, {self.sum};")
        return self.told[-1], len(self.heard) + len(response) / 8, len(self.heard) == 2


def talkative(dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network that often ends an answer, so that there are further turns."""
    model = runs.network(dtype)
    cast(Any, model).output.data[ByteTokenizer.eos_id] += 3 * cast(Any, model).norm.weight.data
    return model


def first(
    stage: str = "ppo", environment: Any = Calculator, **choices: Any
) -> tuple[nn.Module, MicroBatch, list[Trajectory]]:
    """Network, first micro-batch and its answers, in the order in which they were drawn."""
    Calculator.played = []
    roles = {"environment": environment}
    assembly = runs.begin(stage, None, CHOICES | choices, model=talkative(), train_dataset=ROWS, roles=roles)
    task = cast(RLTask, assembly.loop.task)
    batch = runs.first_step(task, assembly.loop.model)[0]
    assert task.collected is not None
    return assembly.loop.model, batch, task.collected[1]


def test_what_the_environment_said_is_in_the_text_and_not_in_the_loss() -> None:
    _, batch, answers = first()
    byte = ByteTokenizer()
    assert max(len(each.heard) for each in Calculator.played) == 2
    for answer, game in zip(answers, Calculator.played, strict=True):
        tokens, learnt = answer.answer.tokens, answer.answer.learnt
        # Whether the last reply was needed or not, those before each answer are there, in their order.
        said = byte.encode("".join(game.told[: len(game.heard)]))
        assert [token for token, own in zip(tokens, learnt, strict=True) if not own] == said
        own = [token for token, is_own in zip(tokens, learnt, strict=True) if is_own]
        assert byte.decode([token for token in own if token != byte.eos_id]) == "".join(game.heard)
        assert len(own) == len(answer.log_probs) == len(cast(tuple[float, ...], answer.score))
    wanted = [
        (-100,) * (len(each.answer.prompt) - 1)
        + tuple(t if own else -100 for t, own in zip(each.answer.tokens, each.answer.learnt, strict=True))
        for each in answers
    ]
    found = sorted(tuple(row.tolist()) for row in batch["targets"])
    width = batch["targets"].shape[1]
    assert found == sorted(each + (-100,) * (width - len(each)) for each in wanted)


def test_probabilities_of_all_turns_are_those_of_the_trainer_and_tokens_are_those_that_were_written() -> None:
    model, batch, answers = first()
    with torch.no_grad():
        found, _ = token_log_probs(policy_of(model), batch["tokens"], batch["targets"], 1.0)
    assert float((found - batch["old"]).abs().max()) < 1e-10
    # Bytes that are no UTF-8, which a text in between would have changed.
    assert any("\ufffd" in ByteTokenizer().decode(each.answer.tokens) for each in answers)


def test_each_turn_earns_its_own_reward() -> None:
    _, _, answers = first()
    for answer, game in zip(answers, Calculator.played, strict=True):
        wanted = [place + len(heard) / 8 for place, heard in enumerate(game.heard, start=1)]
        assert [each for each in cast(tuple[float, ...], answer.score) if each] == wanted
        assert answer.reward == pytest.approx(sum(wanted))
        # The last token that the policy wrote in each turn.
        turns = [len(list(run)) for own, run in itertools.groupby(answer.answer.learnt) if own]
        ends = [place - 1 for place in itertools.accumulate(turns)]
        assert [place for place, each in enumerate(cast(tuple[float, ...], answer.score)) if each] == ends
    with_two = next(each for each, game in zip(answers, Calculator.played, strict=True) if len(game.heard) == 2)
    assert with_two.answer.has_ended or len(with_two.log_probs) > 6


def test_an_episode_that_is_cut_in_its_last_turn_has_not_ended() -> None:
    _, _, answers = first(**{"rl.prompts_per_step": 9})
    over = [answer for answer, game in zip(answers, Calculator.played, strict=True) if len(game.heard) == 2]
    is_cut = [answer.answer.tokens[-1] != ByteTokenizer.eos_id for answer in over]
    assert [answer.answer.has_ended for answer in over] == [not each for each in is_cut]
    assert any(is_cut)


def test_a_mask_that_learns_replies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = rollouts.laid

    def wrong(trajectories: list[Trajectory], pad_id: int) -> dict[str, torch.Tensor]:
        return laid([replace(each, answer=replace(each.answer, learnt=())) for each in trajectories], pad_id)

    monkeypatch.setattr("kitforge.kits.rlhf.judgement.laid", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        test_what_the_environment_said_is_in_the_text_and_not_in_the_loss()


def test_an_interrupted_run_of_episodes_goes_on_bit_for_bit_and_keeps_them(tmp_path: Path) -> None:
    choices = CHOICES | {"trainer.checkpoint_every": 1, "trainer.max_steps": 4, "rl.minibatches": 2}
    given: dict[str, Any] = {"train_dataset": ROWS, "roles": {"environment": Calculator}}

    def begin(folder: Path, **more: Any) -> Any:
        return runs.begin(
            "grpo", folder, choices | {"trainer.keep_checkpoints": 9} | more, model=talkative(torch.float32), **given
        )

    whole = begin(tmp_path / "whole")
    runs.finish(whole)
    assert read_round(tmp_path / "whole", 1) == cast(RLTask, whole.loop.task).collected[1]  # type: ignore[index]
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "killed", 1)
    runs.finish(begin(folder, resume="auto"))
    tiny.assert_same(folder, tmp_path / "whole")


class Endless(Calculator):
    def reset(self, row: Mapping[str, Any]) -> str:
        return "x" * 99


class Vague(Calculator):
    def step(self, response: str) -> tuple[str, float, bool]:
        return "", float("nan"), False


def test_what_an_environment_may_not_do_is_told() -> None:
    with pytest.raises(TrainingError, match="no room for an answer"):
        first(environment=Endless)
    with pytest.raises(TrainingError, match="reward that is no number"):
        first(environment=Vague)
    with pytest.raises(ConfigError, match="as the environment judges"):
        first(**{"rl.missing_end_penalty": 1.0})
    with pytest.raises(ConfigError, match="environment"):
        first(environment=Calculator())
    with pytest.raises(ConfigError, match="scored twice"):
        runs.begin("ppo", None, CHOICES, roles={"environment": Calculator, "reward": runs.letters})
