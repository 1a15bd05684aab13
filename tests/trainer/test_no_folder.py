"""A run that fails before its first step leaves nothing behind; one that fails later leaves what it did."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from kitforge.foundation.errors import DataError
from kitforge.foundation.types import Cursor, MicroBatch
from tests.trainer.regression import Regression, train


class Unreadable(Regression):
    """Points of which only so many can be read."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self._num_good = num_good

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for _, step in zip(range(self._num_good), super().steps(model, cursor), strict=False):
            yield step
        raise DataError("this point cannot be read")


def test_no_folder_is_left_and_latest_is_the_run_before(tmp_path: Path) -> None:
    for earlier in (False, True):
        if earlier:
            train(tmp_path / "good", max_steps=1)
        with pytest.raises(DataError):
            train(tmp_path / "bad", Unreadable(0))
        assert not (tmp_path / "bad").exists()
        assert (tmp_path / "latest").exists() == earlier
    with pytest.raises(DataError):
        train(tmp_path / "runs" / "bad", Unreadable(0))
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "latest").resolve() == tmp_path / "good"


def test_what_was_there_or_was_trained_stays(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train(tmp_path / "some", Unreadable(2))
    assert (tmp_path / "some" / "checkpoints" / "step_2").is_dir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(DataError):
        train(tmp_path / "mine", Unreadable(0))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
