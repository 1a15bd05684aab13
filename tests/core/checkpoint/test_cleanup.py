"""What dead processes leave is swept up; what living ones hold, here or on another machine, is not touched."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kitforge.core.checkpoint.cleanup import clean, restore_folders, set_aside
from kitforge.core.checkpoint.load import newest
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.foundation.files import machine_name, process_name
from tests.core.checkpoint import example


@pytest.fixture
def dead() -> str:
    """The name of a process of this machine that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{machine_name()}-{process.pid}"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_drafts_of_dead_processes_are_deleted(tmp_path: Path, dead: str) -> None:
    (tmp_path / f".step_1.{dead}.draft").mkdir()
    (tmp_path / f".step_2.{dead}.trash").mkdir()
    (tmp_path / f".step_4.{dead}.parts").mkdir()
    # A process that is started again in a container gets the number it had.
    (tmp_path / f".step_3.{process_name()}.draft").mkdir()
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drafts_of_living_processes_and_foreign_folders_stay(tmp_path: Path, dead: str) -> None:
    here = machine_name()
    stay = {f".step_1.{here}-{os.getppid()}.draft", f".step_1.{here}-1.draft", f".mine.{dead}.draft", "step_9.draft"}
    for name in stay:
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert names(tmp_path) == stay


@pytest.mark.parametrize("elsewhere", ["0badcafe-", ""])
def test_what_a_process_of_another_machine_writes_stays_until_it_has_been_idle_for_a_day(
    tmp_path: Path, dead: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its number is free here, or is our own, and says nothing.
    numbers = (dead.rpartition("-")[2], str(os.getpid()))
    stay = {f".step_{step}.{elsewhere}{number}.draft" for step, number in enumerate(numbers)}
    for name in stay:
        (tmp_path / name / "within").mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))
    CheckpointWriter(tmp_path).close()
    assert names(tmp_path) == stay
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 23 * 3600)
    clean(tmp_path)
    assert names(tmp_path) == stay
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    # One of them is written to; the folder itself does not change by that.
    kept = sorted(stay)[0]
    changed, lstat = tmp_path / kept / "within", Path.lstat

    def later(path: Path) -> os.stat_result:
        found = lstat(path)
        return SimpleNamespace(st_ctime=now + 20 * 3600) if path == changed else found  # type: ignore[return-value]

    monkeypatch.setattr(Path, "lstat", later)
    clean(tmp_path)
    assert names(tmp_path) == {kept}


def test_names_of_two_containers_on_one_host_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(path: str) -> str:
        assert path == "/proc/self/ns/pid"
        return "pid:[4026532999]"

    here = machine_name()
    assert machine_name.__wrapped__() == here
    monkeypatch.setattr(os, "readlink", other)
    assert machine_name.__wrapped__() != here


def test_a_step_that_another_machine_was_replacing_is_found_again_when_nobody_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example.saved(tmp_path, 1, 2)
    aside = tmp_path / ".step_2.0badcafe-7.old"
    (tmp_path / "step_2").rename(aside)
    # Its process was alive, and is done by the second look.
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "step_2").mkdir())
    restore_folders(tmp_path)
    assert aside.exists()
    (tmp_path / "step_2").rmdir()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    restore_folders(tmp_path)
    assert steps(tmp_path) == [1, 2]
    assert not aside.exists()


def test_a_step_that_was_being_replaced_is_found_again(tmp_path: Path, dead: str) -> None:
    example.saved(tmp_path, 1, 2)
    (tmp_path / "step_2").rename(tmp_path / f".step_2.{dead}.old")
    checkpoint = newest(tmp_path, on_damaged=pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_a_step_that_was_replaced_is_not_brought_back(tmp_path: Path, dead: str) -> None:
    example.saved(tmp_path, 2)
    old = tmp_path / f".step_2.{dead}.old"
    old.mkdir()
    restore_folders(tmp_path)
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
