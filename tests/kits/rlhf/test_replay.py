"""A step that is trained again from its kept answers gives the figures of the first time, and a change is seen."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import replay
from kitforge.cli import main as cli
from kitforge.core.checkpoint.manifest import steps
from kitforge.foundation.errors import CheckpointError, ConfigError, DataError
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.reinforcement.rollout_log import logged_rollouts, rollout_file
from tests.kits.rlhf import runs

# Two updates a round, so that step 4 is the second one of round 1 and begins within it.
CHOICES: dict[str, Any] = {
    "trainer.max_steps": 6,
    "trainer.checkpoint_every": 2,
    # That of step 0 is there whichever evaluation is the best.
    "trainer.save_total_limit": 9,
    "rl.num_minibatches": 2,
    "rl.prompts_per_rollout": 4,
    "trainer.eval_first": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of PPO."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    runs.finish(runs.begin("ppo", folder, CHOICES))
    return folder


@pytest.mark.parametrize(("step", "start"), [(1, 0), (3, 2), (4, 2), (6, 4)])
def test_a_step_that_is_trained_again_is_the_same_to_the_last_bit(run: Path, step: int, start: int) -> None:
    found = replay(run, step)
    assert (found.start, found.is_same) == (start, True)
    assert {"loss", "grad_norm", "value_loss", "reward", "kl", "learning_rate"} <= set(found.replayed)


@pytest.mark.slow
def test_a_metric_that_other_steps_have_is_not_missing(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    next(line for line in lines if (line["kind"], line["step"]) == ("train", 4))["rare"] = 1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(folder, 3).is_same and not replay(folder, 4).is_same


@pytest.mark.slow
def test_a_change_is_seen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", str(run), "step=3"]) == 0
    assert "equal to the last bit" in capsys.readouterr().out
    # Of an option.
    assert cli.run(["replay", str(run), "step=3", "rl.vf_coef=0.6"]) == 1
    # Of a number in the answers.
    path = rollout_file(run, 1)
    whole = path.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[0]["logprobs"][0] -= 0.1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = replay(run, 3)
    path.write_text(whole)
    differing = {name for name, value in changed.replayed.items() if value != changed.recorded[name]}
    assert {"loss", "grad_norm"} <= differing
    assert "reward" not in differing


@pytest.mark.slow
def test_a_line_that_lacks_what_it_had_is_not_read(run: Path) -> None:
    line = json.loads(rollout_file(run, 0).read_text().splitlines()[0])
    rollout = Rollout.from_dict(line)
    for name in rollout.to_dict():
        rest = {other: value for other, value in line.items() if other != name}
        if name in ("turn_lengths", "observations", "is_turn_ended", "num_tool_errors"):
            # Earlier versions wrote none.
            assert Rollout.from_dict(rest) == rollout
        else:
            with pytest.raises(KeyError, match=name):
                Rollout.from_dict(rest)


def test_what_cannot_be_replayed_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no metrics of step 9"):
        replay(run, 9)
    with pytest.raises(ConfigError, match=r"vf_coef"):
        replay(run, 3, {"rl.vf_coeff": 1})
    for arguments in ([str(run)], ["step=3"], [str(run), "step=x"]):
        with pytest.raises(ConfigError, match="needs one run and one step"):
            cli.run(["replay", *arguments])
    runs.finish(runs.begin("ppo", tmp_path / "late", CHOICES | {"trainer.max_steps": 1, "trainer.eval_first": False}))
    with pytest.raises(CheckpointError, match="no checkpoint before step 1"):
        replay(tmp_path / "late", 1)
    runs.finish(runs.begin("dpo", tmp_path / "pairs", {"trainer.max_steps": 1}))
    with pytest.raises(ConfigError, match="keeps no rollouts to replay"):
        replay(tmp_path / "pairs", 1)


# A run of more rounds than are kept, a step each, whose best evaluation is its first.
LONG: dict[str, Any] = {
    "trainer.max_steps": 12,
    "trainer.eval_first": True,
    "rollout.keep_rollout_files": 3,
    "rollout.max_new_tokens": 3,
    "data.eval_fraction": 0.0,
}


@pytest.mark.slow
def test_rounds_stay_behind_the_checkpoints_that_stay(tmp_path: Path) -> None:
    choices = LONG | {"trainer.checkpoint_every": 4, "trainer.save_total_limit": 2}
    runs.finish(runs.begin("grpo", tmp_path, choices))
    # Step 4 went when step 12 came, with which the run ended; the next round takes those behind it away.
    assert logged_rollouts(tmp_path) == [4, 5, 6, 8, 9, 10, 11]
    for step in (9, 11, 12):
        assert replay(tmp_path, step).is_same
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint before step 7.*a step such as 9, 10, 11, 12"):
        replay(tmp_path, 7)


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [3, 12])
def test_the_last_steps_of_a_run_that_says_nothing_of_checkpoints_can_be_replayed(
    tmp_path: Path, num_steps: int
) -> None:
    choices = LONG | {"trainer.eval_first": False, "trainer.max_steps": num_steps, "rl.epochs": 2}
    runs.finish(runs.begin("grpo", tmp_path, choices))
    # Rounds of two updates, of which three are kept.
    assert steps(tmp_path / "checkpoints") == ([0, 3] if num_steps == 3 else [6, 12])
    for step in (num_steps - 2, num_steps):
        assert replay(tmp_path, step).is_same


@pytest.mark.slow
def test_what_a_refusal_advises_would_have_worked(tmp_path: Path) -> None:
    choices: dict[str, Any] = LONG | {"trainer.eval_first": False}
    runs.finish(runs.begin("grpo", tmp_path / "first", choices))
    for step in (2, 8):
        with pytest.raises(CheckpointError) as refusal:
            replay(tmp_path / "first", step)
        runs.finish(runs.begin("grpo", tmp_path / f"{step}", choices | advised(str(refusal.value))))
        assert replay(tmp_path / f"{step}", step).is_same


@pytest.mark.slow
def test_missing_rounds_are_told_with_what_would_have_kept_them(tmp_path: Path) -> None:
    choices = LONG | {"trainer.checkpoint_every": 6, "rollout.keep_rollout_files": 2}
    runs.finish(runs.begin("grpo", tmp_path / "first", choices))
    with pytest.raises(DataError, match=r"(?s)between checkpoint 6 and step 11 were not kept") as refusal:
        replay(tmp_path / "first", 11)
    runs.finish(runs.begin("grpo", tmp_path / "second", choices | advised(str(refusal.value))))
    assert replay(tmp_path / "second", 11).is_same


def advised(message: str) -> dict[str, int]:
    """The options that a refusal names."""
    found = {name: int(value) for name, value in re.findall(r"((?:trainer|rollout)\.\w+)=(\d+)", message)}
    assert found
    return found
