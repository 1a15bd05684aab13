"""What no stage bends: micro-batches equal the batch, and a resumed run equals one that was never interrupted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.kits.rlhf import batching
from tests.differential.drawn import WHOLE
from tests.kits.rlhf import runs
from tests.trainer import tiny

STAGES = [*runs.ROWS, *runs.RL, *runs.ON_POLICY]


# Each way of counting a row's tokens; micro-batches of every task are in tests/verify.
COUNTED = [stage for stage in STAGES if stage != "kto"] if WHOLE else ["sft", "dpo", "ppo", "distill", "online_dpo"]


@pytest.mark.prove
@pytest.mark.parametrize("stage", COUNTED)
def test_as_many_rows_at_once_as_a_processor_likes_change_no_gradient(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(tokens: int) -> tuple[int, torch.Tensor]:
        monkeypatch.setattr(batching, "CPU_TOKENS", tokens)
        assembly = runs.begin(stage, None, {}, model=runs.network(torch.float64))
        return len(runs.first_step(assembly.loop.task, assembly.loop.model)), runs.gradient(assembly)

    (alone, whole), (several, parts) = found(10**6), found(30)
    assert alone == 1 < several
    assert float((parts - whole).norm() / whole.norm()) < 1e-10


@pytest.mark.parametrize("stage", STAGES)
def test_rows_may_stand_in_any_order(stage: str) -> None:
    assembly = runs.begin(stage, None, {"trainer.micro_batch_size": None}, model=runs.network(torch.float64))
    task, model = assembly.loop.task, assembly.loop.model
    (batch,) = runs.first_step(task, model)

    def gradient(micro_batch: dict[str, Any]) -> torch.Tensor:
        learning = [each for each in model.parameters() if each.requires_grad]
        found = torch.autograd.grad(task.loss(model, micro_batch)["loss"], learning)
        return torch.cat([each.flatten() for each in found])

    given = gradient(batch)
    assert float((gradient(turned(batch)) - given).norm() / given.norm()) < 1e-10


def turned(batch: dict[str, Any]) -> dict[str, Any]:
    """The last row first; of pairs, each of their halves."""
    rows = len(batch["tokens"])
    half = rows // 2 if "weights" in batch else rows

    def flipped(value: Any) -> Any:
        if isinstance(value, list):
            return value[::-1]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        return torch.cat([part.flip(0) for part in value.split(half)])

    return {name: flipped(value) for name, value in batch.items()}


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("stage", [*(("ppo", "grpo", "reinforce_pp") if WHOLE else ("ppo",)), *runs.ON_POLICY])
def test_a_round_that_was_interrupted_goes_on_bit_for_bit(stage: str, tmp_path: Path) -> None:
    choices = {
        "trainer.checkpoint_every": 1,
        "trainer.save_total_limit": 9,
        "trainer.max_steps": 6,
        "rl.epochs": 2,
        "rl.num_minibatches": 2,
    }
    # A critic has a rate of its own.
    choices |= {"critic.learning_rate": 3e-2} if stage == "ppo" else {}
    runs.finish(runs.begin(stage, tmp_path / "whole", choices))
    # After the first update of a round, in its second pass, and between two rounds.
    for killed in (1, 3, 4):
        folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / f"killed_{killed}", killed)
        runs.finish(runs.begin(stage, folder, choices | {"resume": "auto"}))
        tiny.assert_same(folder, tmp_path / "whole")
