"""What a run that stopped early gives to whoever opens its folder."""

from pathlib import Path

import pytest
import torch

from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.task import TextGenerationTask
from tests.trainer import tiny

KIT = TASKS["text_generation"]


def test_the_folder_of_a_run_that_stopped_early_gives_the_best_weights(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(TextGenerationTask, "evaluate", lambda *_: {"eval/loss": next(losses)})
    options = {"trainer.eval_every": 1, "trainer.early_stopping": 2, "inference.max_new_tokens": 1}
    assembly = tiny.run(tmp_path / "run", corpus, options)
    found = KIT.load(tmp_path / "run", torch.device("cpu")).state_dict()
    best = KIT.load(tmp_path / "run" / "checkpoints" / "step_2", torch.device("cpu")).state_dict()
    last = KIT.load(tmp_path / "run" / "checkpoints" / "step_4", torch.device("cpu")).state_dict()
    assert all(torch.equal(found[name], best[name]) for name in best)
    assert any(not torch.equal(found[name], last[name]) for name in last)
    assert all(torch.equal(found[name], value) for name, value in assembly.loop.model.state_dict().items())
