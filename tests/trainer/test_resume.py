"""A run that goes on from any of its checkpoints equals the one that was never interrupted, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitforge.core.optim.build import Optimizer
from kitforge.core.optim.schedules import Plateau
from kitforge.foundation import device as devices
from kitforge.foundation.types import Cursor
from kitforge.trainer.precision import GradScaler
from kitforge.trainer.state import TrainingState
from tests.trainer import regression, tiny

EVERY_STEP = {
    "trainer.checkpoint_every": 1,
    "trainer.save_total_limit": 100,
    "trainer.log_every": 4,
    "trainer.eval_every": 2,
    "trainer.eval_first": True,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Path]:
    """The folder of the run of a kind, made once."""
    folder = tmp_path_factory.mktemp("uninterrupted")

    def find(kind: str) -> Path:
        if not (folder / kind).exists():
            tiny.run(folder / kind, corpus, tiny.KINDS[kind] | EVERY_STEP)
        return folder / kind

    return find


def resumed(source: Path, target: Path, corpus: Path, kind: str, step: int) -> Path:
    """The run cut back to the checkpoint of `step` and trained to its end again."""
    tiny.copy_up_to(source, target, step)
    tiny.run(target, corpus, tiny.KINDS[kind] | EVERY_STEP | {"resume": "auto"})
    return target


# Before, between and at a log line and an evaluation, and at the end.
PLACES = [*(("adamw", step) for step in range(7)), *((kind, step) for kind in tiny.KINDS for step in (1, 3, 4))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), sorted(set(PLACES)))
def test_resuming_from_any_step_changes_nothing(
    tmp_path: Path, corpus: Path, uninterrupted: Callable[[str], Path], kind: str, step: int
) -> None:
    whole = uninterrupted(kind)
    tiny.assert_same(resumed(whole, tmp_path / "again", corpus, kind, step), whole)


NOISY = regression.Regression(dropout=0.5)


def forget(*_arguments: object) -> None:
    """What a resume does when somebody forgot a part of it."""


def load_without(name: str, value: Any) -> Callable[[TrainingState, Any], None]:
    load = TrainingState.load_checkpoint

    def loaded(state: TrainingState, checkpoint: Any) -> None:
        load(state, checkpoint)
        setattr(state, name, value)

    return loaded


FAULTS: dict[str, tuple[str, type[Any], str, Callable[..., Any]]] = {
    "the optimizer": ("adamw", Optimizer, "load", forget),
    "the place in the data": ("adamw", TrainingState, "load_checkpoint", load_without("cursor", Cursor(step=3))),
    "the steps of the schedule": ("adamw", TrainingState, "load_checkpoint", load_without("updates", 0)),
    "the window of the log": ("adamw", TrainingState, "load_checkpoint", load_without("log_accumulator", {})),
    "the best evaluation": ("adamw", TrainingState, "load_checkpoint", load_without("best_value", -1.0)),
    "the loss scale": ("a loss scale that falls", GradScaler, "load_state", forget),
    "the plateau": ("a plateau", Plateau, "load_state", forget),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_that_forgets_something_is_noticed(
    tmp_path: Path, corpus: Path, uninterrupted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    kind, owner, name, planted = FAULTS[fault]
    whole = uninterrupted(kind)
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, KeyError)):
        tiny.assert_same(resumed(whole, tmp_path / "again", corpus, kind, 3), whole)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_torchs_own_dropout_goes_on_with_the_same_noise(tmp_path: Path, step: int) -> None:
    regression.train(tmp_path / "whole", NOISY)
    regression.train(tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", step), NOISY, resume="auto")
    tiny.assert_same(tmp_path / "again", tmp_path / "whole")


def test_a_resume_without_torchs_random_state_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regression.train(tmp_path / "whole", NOISY)
    monkeypatch.setattr(devices, "set_random_state", forget)
    regression.train(tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", 3), NOISY, resume="auto")
    with pytest.raises(AssertionError):
        tiny.assert_same(tmp_path / "again", tmp_path / "whole")
