"""Ctrl-C: the step is finished, the run saved and reported, and `resume=auto` goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kitforge.core.checkpoint.layout import steps
from kitforge.trainer.callbacks.callback import Callback, Event, Run
from tests.trainer import tiny

CHECKOUT = Path(__file__).parents[2]
LONG = {"trainer.log_every": 4, "trainer.evaluate_every": 3}


class Impatient(Callback):
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_event(self, event: Event, run: Run) -> None:
        if event.kind == "step" and run.state.cursor.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def state(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_an_interrupted_run_goes_on_exactly(tmp_path: Path, corpus: Path, step: int) -> None:
    tiny.run(tmp_path / "whole", corpus, LONG, [Impatient(0)])
    halted = tiny.run(tmp_path / "halted", corpus, LONG, [Impatient(step)])
    assert halted.loop.was_interrupted
    assert f"stopped after step {step}" in tiny.events(tmp_path / "halted", "interrupt")[0]
    assert steps(tmp_path / "halted" / "checkpoints")[-1] == step
    assert (tmp_path / "halted" / "report.html").exists()
    tiny.run(tmp_path / "halted", corpus, LONG | {"resume": "auto"}, [Impatient(0)])
    tiny.assert_same(tmp_path / "halted", tmp_path / "whole")


@pytest.mark.slow
def test_the_command_ends_with_status_130_when_it_is_interrupted(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    options = [f"data.train={corpus / 'corpus.txt'}", f"output_dir={folder}", "trainer.max_steps=100000"]
    options += ["data.sequence_length=32", "data.batch_size=1", "inference.max_new_tokens=2"]
    sizes = {name: value for name, value in tiny.LLAMA.items() if name != "family"} | {"num_kv_heads": 2}
    options += [f"model.{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, "-m", "kitforge", "train", *options]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (folder / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"output_dir={folder} resume=auto" in output.replace("\n", " ")
    assert steps(folder / "checkpoints") != []
    assert (folder / "report.html").exists()
