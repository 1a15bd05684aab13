"""A step that is trained again from its kept answers gives the figures of the first time, and a change is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import replay
from kitforge.cli import main as cli
from kitforge.foundation.errors import CheckpointError, ConfigError, DataError
from kitforge.kits.rlhf.record import round_file
from tests.kits.rlhf import runs

# Two updates a round, so that step 4 is the second one of round 1 and begins within it.
CHOICES: dict[str, Any] = {
    "trainer.max_steps": 6,
    "trainer.checkpoint_every": 2,
    # That of step 0 is there whichever evaluation is the best.
    "trainer.keep_checkpoints": 9,
    "rl.minibatches": 2,
    "rl.prompts_per_step": 4,
    "trainer.evaluate_first": True,
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
    assert {"loss", "grad_norm", "value_loss", "reward", "kl", "learning_rate"} <= set(found.found)


def test_a_change_is_seen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", str(run), "step=3"]) == 0
    assert "equal to the last bit" in capsys.readouterr().out
    # Of an option.
    assert cli.run(["replay", str(run), "step=3", "rl.value_weight=0.6"]) == 1
    # Of a number in the answers.
    path = round_file(run, 1)
    whole = path.read_text()
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[0]["log_probs"][0] -= 0.1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = replay(run, 3)
    path.write_text(whole)
    differing = {name for name, value in changed.found.items() if value != changed.recorded[name]}
    assert {"loss", "grad_norm"} <= differing
    assert "reward" not in differing


def test_what_cannot_be_replayed_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="logged nothing at step 9"):
        replay(run, 9)
    with pytest.raises(ConfigError, match=r"value_weight"):
        replay(run, 3, {"rl.value_wait": 1})
    for arguments in ([str(run)], ["step=3"], [str(run), "step=x"]):
        with pytest.raises(ConfigError, match="one step of one run"):
            cli.run(["replay", *arguments])
    runs.finish(
        runs.begin("ppo", tmp_path / "late", CHOICES | {"trainer.max_steps": 1, "trainer.evaluate_first": False})
    )
    with pytest.raises(CheckpointError, match="no checkpoint before step 1"):
        replay(tmp_path / "late", 1)
    runs.finish(runs.begin("dpo", tmp_path / "pairs", {"trainer.max_steps": 1}))
    with pytest.raises(ConfigError, match="keep what they were trained on"):
        replay(tmp_path / "pairs", 1)
