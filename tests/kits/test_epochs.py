"""The metric `epoch` is samples over rows: batches run across the ends of passes."""

from pathlib import Path
from typing import Any

import pytest

from kitforge.api import Trainer
from kitforge.data.schedule import BatchSchedule, Mixture
from tests.kits.rlhf import runs
from tests.kits.transformers import test_classification
from tests.trainer import tiny

LLAMA: dict[str, Any] = {"model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.num_kv_heads": 1}
SHORT: dict[str, Any] = {"trainer.progress": False, "trainer.log_every": 1, "device": "cpu", "data.sequence_length": 48}
ROWS: dict[str, Any] = {
    "sft": runs.DEMONSTRATIONS,
    "dpo": runs.PAIRS,
    "kto": runs.JUDGED,
    "text_classification": test_classification.rows(),
    "recommendation": [{"a": n % 3, "b": n % 4, "label": n % 2} for n in range(24)],
}


@pytest.mark.parametrize(("num_rows", "batch", "epochs"), [(9, 8, 8), (10, 4, 2), (5, 5, 3), (7, 4, 1.5)])
def test_a_schedule_counts_samples(num_rows: int, batch: int, epochs: float) -> None:
    schedule = BatchSchedule(num_rows=num_rows, batch_size=batch, seed=0, epochs=epochs)
    done = [each.start + len(each.rows) for each in schedule.batches(0)]
    assert [schedule.epoch(each) for each in done] == [each / num_rows for each in done]
    assert schedule.epoch(done[-1]) == pytest.approx(epochs, abs=0.5 / num_rows)


def test_an_epoch_of_a_mixture_ends_when_every_source_was_read() -> None:
    mixture = Mixture(names=("a", "b"), weights=(3.0, 1.0), num_rows=(6, 4), seed=0)
    schedule = BatchSchedule(num_rows=10, batch_size=4, seed=0, mixture=mixture)
    assert mixture.counts(schedule.num_samples(1.0))[1] == 4
    assert schedule.epoch(schedule.num_samples(1.0)) == 1.0 and schedule.epoch(4) < 4 / 10


def epochs_of(task: str, folder: Path, rows: Any, **choices: Any) -> list[float]:
    options = SHORT | ({} if task == "recommendation" else LLAMA) | choices
    options = {name: value for name, value in options.items() if task != "recommendation" or "sequence" not in name}
    roles = {"reward": runs.letters} if task in runs.RL else None
    model = "deepfm" if task == "recommendation" else "llama_tiny"
    Trainer(task, model, rows, roles=roles, output_dir=folder, options=options).train()
    return [line["epoch"] for line in tiny.records(folder, "train")]


@pytest.mark.parametrize(
    "task", ["sft", pytest.param("kto", marks=pytest.mark.slow), "text_classification", "recommendation"]
)
def test_every_task_logs_samples_over_rows(task: str, tmp_path: Path) -> None:
    found = epochs_of(
        task, tmp_path, ROWS[task][:9], **{"data.batch_size": 8, "trainer.epochs": 3, "data.eval_fraction": 0.0}
    )
    assert found == pytest.approx([8 / 9, 16 / 9, 24 / 9, 3.0])


@pytest.mark.parametrize("updates", [1, 2])
def test_policy_gradients_count_prompts(updates: int, tmp_path: Path) -> None:
    choices = {"rl.prompts_per_rollout": 4, "rl.epochs": updates, "rollout.max_new_tokens": 2, "trainer.epochs": 2}
    found = epochs_of("ppo", tmp_path, runs.PROMPTS[:10], **choices, **{"data.eval_fraction": 0.0})
    assert found == pytest.approx([4 / 10 * step / updates for step in range(1, 5 * updates + 1)])


def test_documents_count_as_their_rows(tmp_path: Path) -> None:
    texts = ["The moon rises over the hill. " * 8] * 3
    choices = {"data.sequence_length": 16, "data.batch_size": 8, "trainer.epochs": 2, "data.eval_fraction": 0.0}
    found = epochs_of("text_generation", tmp_path, texts, **choices)
    assert found[-1] == 2.0 and found[0] == pytest.approx(found[1] / 2)
