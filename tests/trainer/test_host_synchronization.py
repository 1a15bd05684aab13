"""A training step waits for its device once, at its end: the norm and the logged sums come in one transfer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.api import Trainer
from kitforge.kits.transformers import task as text_task
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.device_reads import DeviceReads, counted
from tests.small_run import OPTIONS, TEXT


class ReadsPerStep(Callback):
    """Marks the weights as on the device, and notes what each step reads."""

    def __init__(self, reads: DeviceReads) -> None:
        self._reads = reads
        self.steps: list[list[str]] = []

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start":
            for parameter in run.model.parameters():
                self._reads.mark(parameter)
        if event.kind == "step":
            self.steps.append(self._reads.found[:])
        self._reads.found.clear()


def steps_of(folder: Path, **changes: Any) -> list[list[str]]:
    (folder / "corpus.txt").write_text(TEXT)
    options = {**OPTIONS, "data.cache": str(folder / "cache"), "trainer.log_every": 2, **changes}
    with counted() as reads:
        callback = ReadsPerStep(reads)
        places = {"train_dataset": folder / "corpus.txt", "output_dir": folder / "run"}
        Trainer("text_generation", "llama_tiny", **places, options=options, callbacks=[callback]).train()
    return callback.steps


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"trainer.micro_batch_size": 2},
        {"model.attention_dropout": 0.1},
        {"optimizer.name": "muon"},
    ],
    ids=str,
)
def test_a_step_reads_the_device_once(changes: dict[str, Any], tmp_path: Path) -> None:
    steps = steps_of(tmp_path, **changes)
    assert [len(reads) for reads in steps] == [1, 1, 1], steps
    assert all("optimizer_step" in reads[0] for reads in steps)


def test_a_loss_that_is_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = text_task.TextGenerationTask.loss

    def curious(task: Any, model: Any, micro_batch: Any) -> Any:
        sums = loss(task, model, micro_batch)
        assert bool(torch.isfinite(sums["loss"]))
        return sums

    monkeypatch.setattr(text_task.TextGenerationTask, "loss", curious)
    assert [len(reads) for reads in steps_of(tmp_path)] == [2, 2, 2]
