"""A run that goes on from any of its checkpoints equals the one that was never interrupted, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("step", [1, 3, 5])
def test_torchs_own_dropout_goes_on_with_the_same_noise(tmp_path: Path, step: int) -> None:
    regression.train(tmp_path / "whole", NOISY)
    regression.train(tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", step), NOISY, resume="auto")
    tiny.assert_same(tmp_path / "again", tmp_path / "whole")
