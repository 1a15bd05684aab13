"""Ctrl-C: the step is finished, the run saved and reported, and `resume=auto` goes on as if nothing had happened."""

import os
import signal
from pathlib import Path

import pytest

from kitforge.core.checkpoint.manifest import steps
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.trainer import tiny

LONG = {"trainer.log_every": 4, "trainer.eval_every": 3}


class Impatient(Callback):
    """Presses Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def state(self) -> dict[str, int]:
        return {}


@pytest.mark.slow
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
