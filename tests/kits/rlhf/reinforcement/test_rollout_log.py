"""The answers of a run lie in its folder: readable, bounded, and bit for bit what was trained on."""

import io
import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import pytest
from rich.console import Console

from kitforge.foundation.errors import DataError
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_log import read_rollouts, rollout_file
from kitforge.trainer.callbacks import progress
from tests.kits.rlhf import runs
from tests.trainer import tiny


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_of_a_policy_is_its_reward_its_distance_and_its_length(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    # What is imported while a bar is shown may keep hold of the stream that the bar puts in place of stdout.
    plain = partial(progress.Progress, redirect_stdout=False, redirect_stderr=False)
    monkeypatch.setattr(progress, "Progress", plain)
    runs.finish(runs.begin("ppo", tmp_path, {"trainer.max_steps": 1, "trainer.progress": True}))
    line = tiny.records(tmp_path, "train")[0]
    text = cast(io.StringIO, console.file).getvalue()
    shown = ("reward", "kl", "completion/mean_length")
    assert "  ".join(f"{name} {line[name]:.4f}" for name in shown) + "  lr " in text
    assert "loss" not in text


@final
class FakeTable:
    def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
        self.columns, self.data = columns, data


@pytest.mark.parametrize("kept", [0, 2])
def test_the_answers_of_a_round_are_a_table_in_the_tracker(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, Any]]] = []
    fake: Any = types.ModuleType("wandb")
    fake.init = fake.finish = lambda **_: None
    fake.log = lambda values, step: logged.append((step, values))
    fake.Table = FakeTable
    monkeypatch.setitem(sys.modules, "wandb", fake)
    choices = {"trainer.max_steps": 2, "rl.epochs": 2, "rollout.keep_rollout_files": kept, "trainer.wandb": "project"}
    roles = {"reward": {"letters": runs.letters, "exact": (2.0, "exact")}}
    assembly = runs.begin("ppo", tmp_path, choices, roles=roles)
    runs.finish(assembly)
    (step, table), *others = [(step, values["completions"]) for step, values in logged if "completions" in values]
    assert step == 1 and not others
    assert table.columns == ["prompt", "completion", "reward", "rewards/letters", "rewards/exact", "advantage"]
    answers = runs.collected(assembly.loop.task)
    assert [row[2] for row in table.data] == [each.reward for each in answers]
    assert [row[3] + 2 * row[4] for row in table.data] == pytest.approx([row[2] for row in table.data])
    assert all(row[0].startswith("Q") for row in table.data)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(each)["kind"] for each in lines} <= {"train", "eval", "event"}


def test_a_round_that_was_kept_is_the_round_that_was_trained_on(tmp_path: Path) -> None:
    assembly = runs.begin(
        "ppo", tmp_path, {"trainer.max_steps": 3, "rollout.keep_rollout_files": 2, "rl.old_logprobs": "recompute"}
    )
    runs.finish(assembly)
    number, answers = cast(PolicyGradientTask, assembly.loop.task).collected or (0, [])
    assert number == 2
    assert read_rollouts(tmp_path, 2) == answers
    lines = [json.loads(line) for line in rollout_file(tmp_path, 2).read_text().splitlines()]
    assert [line["prompt"][0] for line in lines] == ["Q"] * 4
    assert list(lines[0])[:5] == ["prompt", "completion", "reward", "advantage", "kl"]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["round_1.jsonl", "round_2.jsonl"]
    with pytest.raises(DataError, match=r"(?s)rollout batch 0 were not kept.*batches 1, 2.*keep_rollout_files"):
        read_rollouts(tmp_path, 0)


def test_keeping_rounds_can_be_switched_off(tmp_path: Path) -> None:
    runs.finish(runs.begin("grpo", tmp_path, {"trainer.max_steps": 1, "rollout.keep_rollout_files": 0}))
    assert not (tmp_path / "rollouts").exists()


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    runs.finish(runs.begin("grpo", tmp_path, {"trainer.max_steps": 1}))
    path = rollout_file(tmp_path, 0)
    path.write_text(path.read_text().replace('"tokens"', '"words"', 1))
    with pytest.raises(DataError, match="round_0.jsonl line 1 is not a rollout"):
        read_rollouts(tmp_path, 0)
