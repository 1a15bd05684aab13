"""A step whose gradients are not finite leaves everything as it was, is counted and is told."""

from pathlib import Path

import pytest

from kitforge.core.checkpoint.manifest import steps
from kitforge.foundation.errors import TrainingError
from kitforge.trainer import loop, precision
from kitforge.trainer.precision import GradScaler
from tests.trainer import tiny
from tests.trainer.regression import Recorder, Regression, train


def recorded(folder: Path, *broken: int, **choices: object) -> Recorder:
    recorder = Recorder()
    train(folder, Regression(broken=broken), callbacks=[recorder], **choices)
    return recorder


def equal(left: list, right: list) -> bool:
    return all(a.equal(b) for a, b in zip(left, right, strict=True))


def test_weights_and_optimizer_stay_as_they_were(tmp_path: Path) -> None:
    after = recorded(tmp_path, 3, 4)
    for step in (3, 4):
        assert equal(after.weights[step], after.weights[2])
        assert equal(after.optimizer[step], after.optimizer[2])
    assert not equal(after.weights[5], after.weights[2])


def test_the_schedule_does_not_advance(tmp_path: Path) -> None:
    after = recorded(tmp_path, 3, 4)
    assert list(after.updates.values()) == [1, 2, 2, 2, 3, 4]
    rates = [record["learning_rate"] for record in tiny.records(tmp_path, "train")]
    assert rates[2] == rates[3] == rates[4] > rates[5]


def test_skips_are_counted_and_told(tmp_path: Path) -> None:
    recorded(tmp_path, 3, 4)
    assert [record["skipped"] for record in tiny.records(tmp_path, "train")] == [0, 0, 1, 2, 2, 2]
    messages = tiny.events(tmp_path, "skip")
    assert len(messages) == 2
    assert "nan at step 3" in messages[0]


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    recorded(tmp_path, 3)
    record = tiny.records(tmp_path, "train")[2]
    assert record["loss"] is None
    assert record["grad_norm"] is None


def test_too_many_skips_in_a_row_end_the_run_which_keeps_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPS", 2)
    with pytest.raises(TrainingError, match="non-finite gradients in 2 steps in a row"):
        recorded(tmp_path, 2, 4, 5, checkpoint_every=None)
    assert steps(tmp_path / "checkpoints") == [5]
    assert (tmp_path / "report.html").exists()


def test_no_checkpoint_is_saved_while_steps_are_skipped(tmp_path: Path) -> None:
    recorded(tmp_path, 3, 4)
    assert steps(tmp_path / "checkpoints") == [1, 2, 5, 6]


def test_the_loss_scale_halves_at_a_bad_step_and_doubles_after_many_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 2)
    scaler, scales = GradScaler("fp16"), []
    for is_finite in (True, False, True, False, True, True):
        scaler.update(is_finite)
        scales.append(scaler.scale / 2.0**16)
    assert scales == [1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 2]


def test_a_bad_step_halves_the_scale_of_the_run(tmp_path: Path) -> None:
    after = recorded(tmp_path, 3, precision="fp16")
    assert after.scales[3] == after.scales[2] / 2


def test_the_loss_scale_stays_between_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 1)
    scaler = GradScaler("fp16")
    for _ in range(30):
        scaler.update(False)
    assert scaler.scale == 1.0
    for _ in range(30):
        scaler.update(True)
    assert scaler.scale == precision.MAX_SCALE


def test_the_loss_scale_of_fp16_does_not_reach_another_precision() -> None:
    half, whole = GradScaler("fp16"), GradScaler("fp32")
    whole.load_state(half.state())
    assert whole.scale == 1.0
    half.load_state(whole.state())
    assert half.scale == 2.0**16


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_run_with_skips_resumes_exactly(tmp_path: Path, step: int) -> None:
    train(tmp_path / "whole", Regression(broken=(3, 4)), precision="fp16")
    again = tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", step)
    train(again, Regression(broken=(3, 4)), "auto", precision="fp16")
    tiny.assert_same(again, tmp_path / "whole")
