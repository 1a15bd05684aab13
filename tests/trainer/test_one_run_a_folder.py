"""A folder belongs to one run at a time, of any process or thread; what is handed over as a callback is one."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.files import held_folder
from tests.trainer.regression import Regression, train


class Twice(Regression):
    """A run during which another one begins in its folder."""

    def __init__(self, folder: Path, resume: str | None) -> None:
        super().__init__()
        self.folder, self.resume = folder, resume

    def steps(self, model: nn.Module, cursor: Any) -> Any:
        for number, step in enumerate(super().steps(model, cursor)):
            if number == 2:
                with pytest.raises(ConfigError, match="another run is writing"):
                    train(self.folder, resume=self.resume, checkpoint_every=100)
            yield step


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_run_leaves_the_first_as_it_would_be_alone(tmp_path: Path, resume: str | None) -> None:
    alone = train(tmp_path / "alone", checkpoint_every=100)
    shared = train(tmp_path / "shared", Twice(tmp_path / "shared", resume), checkpoint_every=100)
    assert [row["loss"] for row in shared.history] == [row["loss"] for row in alone.history]
    train(tmp_path / "shared", resume="auto", max_steps=8, allow_config_changes=True)


class Nothing(Regression):
    """No batches."""

    def steps(self, model: nn.Module, cursor: Any) -> Any:
        return iter(())


def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: train(None), range(3)))
    assert sorted(run.folder.name for run in runs) == [f"now-custom-Regression{end}" for end in ("", "-2", "-3")]
    assert all((run.folder / "checkpoints" / "step_6").is_dir() for run in runs)
    with pytest.raises(TrainingError):
        train(None, Nothing())
    assert len([path for path in Path("runs").iterdir() if not path.is_symlink()]) == 3


def test_a_folder_is_free_once_its_process_is_gone(tmp_path: Path) -> None:
    hold = """if True:
        import sys, pathlib, kitforge.foundation.files as files
        with files.held_folder(pathlib.Path(sys.argv[1])):
            print('held', flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError), held_folder(tmp_path):
            pass
        other.kill()
        other.wait()
    with held_folder(tmp_path):
        pass


def test_a_callback_of_another_library_is_refused(tmp_path: Path) -> None:
    for given in (lambda *event: None, object(), Regression):
        with pytest.raises(ConfigError, match="this is not a callback"):
            train(tmp_path / "run", callbacks=[cast(Any, given)])
