"""What dead processes leave is swept up; what living ones hold is not touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kitforge.core.checkpoint.layout import steps
from kitforge.core.checkpoint.leftovers import clean, restore, set_aside
from kitforge.core.checkpoint.load import newest
from tests.core.checkpoint import example


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_drafts_of_dead_processes_are_deleted(tmp_path: Path, dead: int) -> None:
    (tmp_path / f".step_1.{dead}.draft").mkdir()
    (tmp_path / f".step_2.{dead}.trash").mkdir()
    (tmp_path / f".step_4.{dead}.parts").mkdir()
    # A process that is started again in a container gets the number it had.
    (tmp_path / f".step_3.{os.getpid()}.draft").mkdir()
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_living_processes_and_foreign_folders_stay(tmp_path: Path, dead: int) -> None:
    stay = {f".step_1.{os.getppid()}.draft", ".step_1.1.draft", f".mine.{dead}.draft", "step_9.draft"}
    for name in stay:
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == stay


def test_a_step_that_was_being_replaced_is_found_again(tmp_path: Path, dead: int) -> None:
    example.saved(tmp_path, 1, 2)
    (tmp_path / "step_2").rename(tmp_path / f".step_2.{dead}.old")
    checkpoint = newest(tmp_path, on_damaged=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_a_step_that_was_replaced_is_not_brought_back(tmp_path: Path, dead: int) -> None:
    example.saved(tmp_path, 2)
    old = tmp_path / f".step_2.{dead}.old"
    old.mkdir()
    restore(tmp_path)
    assert old.exists()
    clean(tmp_path)
    assert not old.exists()
    assert steps(tmp_path) == [2]


def test_a_folder_set_aside_is_no_step_any_more(tmp_path: Path) -> None:
    example.saved(tmp_path, 1, 2)
    aside = set_aside(tmp_path / "step_1")
    assert steps(tmp_path) == [2]
    assert (aside / "manifest.json").exists()


def test_a_root_that_is_not_there_needs_no_sweeping(tmp_path: Path) -> None:
    clean(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
