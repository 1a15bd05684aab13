"""A round ends early once an update is too far from the policy that answered."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kits.rlhf import runs
from tests.trainer import tiny

CHOICES: dict[str, Any] = {
    "rl.epochs": 4,
    "rl.target_kl": 1e-6,
    "trainer.max_steps": 8,
    "trainer.checkpoint_every": 1,
    "trainer.save_total_limit": 9,
    "data.eval_fraction": 0.0,
}


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoints" / f"step_{step}").glob("model-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def are_same(folder: Path, step: int, other: Path, at: int) -> bool:
    found, wanted = weights(folder, step), weights(other, at)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_updates_beyond_the_target_are_not_made_and_the_next_round_begins_with_the_weights_before(
    tmp_path: Path,
) -> None:
    runs.finish(runs.begin("ppo", tmp_path, CHOICES))
    assert not are_same(tmp_path, 1, tmp_path, 5)
    for step in (2, 3, 4):
        assert are_same(tmp_path, 1, tmp_path, step)
    lines = tiny.records(tmp_path, "train")
    assert [line["skipped"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6]
    # What ended the round is logged; steps that are left of it have no figures.
    assert ["reward" in line for line in lines] == [True, True, False, False] * 2
    assert lines[1]["approx_kl"] > 1.5e-6
    assert [line["num_target_kl_stops"] for line in lines if "reward" in line] == [0, 0, 1, 1]
    (first, second) = tiny.events(tmp_path, "skip")
    assert "rl.target_kl" in first and "step 2" in first and "step 6" in second


def test_a_target_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    for name, target in (("with", 1e6), ("without", None)):
        runs.finish(runs.begin("ppo", tmp_path / name, CHOICES | {"rl.target_kl": target, "trainer.max_steps": 4}))
    assert are_same(tmp_path / "with", 4, tmp_path / "without", 4)


@pytest.mark.slow
def test_micro_batches_of_a_step_decide_as_one(tmp_path: Path) -> None:
    lines = []
    for name, size in (("whole", None), ("pieces", 1)):
        model = runs.network(torch.float64)
        choices = CHOICES | {"trainer.micro_batch_size": size, "trainer.max_steps": 5}
        runs.finish(runs.begin("ppo", tmp_path / name, choices, model=model))
        lines.append(tiny.records(tmp_path / name, "train"))
    assert [line["skipped"] for line in lines[0]] == [line["skipped"] for line in lines[1]] == [0, 1, 2, 3, 3]
    assert lines[0][1]["approx_kl"] == pytest.approx(lines[1][1]["approx_kl"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_is_resumed_within_a_round_that_has_ended_goes_on_as_if_never_stopped(
    step: int, tmp_path: Path
) -> None:
    runs.finish(runs.begin("ppo", tmp_path / "whole", CHOICES))
    found = str(tmp_path / "whole" / "checkpoints" / f"step_{step}")
    runs.finish(runs.begin("ppo", tmp_path / "resumed", CHOICES | {"resume": found}))
    assert are_same(tmp_path / "resumed", 8, tmp_path / "whole", 8)
    after = [line for line in tiny.records(tmp_path / "whole", "train") if line["step"] > step]
    assert [line.get("reward") for line in tiny.records(tmp_path / "resumed", "train")] == [
        line.get("reward") for line in after
    ]
