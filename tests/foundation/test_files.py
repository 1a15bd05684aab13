import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import atomic_file, atomic_folder, sha256, user_path, write_text


def test_a_file_appears_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "a.txt", "é")
    assert (tmp_path / "deep" / "a.txt").read_text(encoding="utf-8") == "é"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_file(target) as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    target = tmp_path / "step"
    for content in ("one", "two"):
        with atomic_folder(target) as draft:
            (draft / content).write_text(content)
    assert [path.name for path in target.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_folder_vanishes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "step") as draft:
        (draft / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_text("old")
    program = (
        "import os, signal, sys, pathlib\n"
        "from kitforge.foundation.files import atomic_file\n"
        "with atomic_file(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    assert target.read_text() == "old"


@given(st.text("~./ab", max_size=6).map(lambda rest: f"~{rest}") | st.text("~./ab", max_size=6))
def test_a_home_folder_is_that_of_the_shell_or_the_user_is_told(path: str) -> None:
    found = os.path.expanduser(path)
    if not found.startswith("~"):
        assert user_path(path) == Path(found)
    else:
        with pytest.raises(ConfigError, match=r"(?s)got:.*~.*expected:.*do:"):
            user_path(path)


def test_a_file_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("./~t.csv").touch()
    assert user_path("~t.csv").samefile(tmp_path / "~t.csv")


def test_the_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is asked of the system, in order: a kill of a process cannot see it, a power cut does."""
    told: list[str] = []

    def name(path: Path) -> str:
        return "." if path == tmp_path else "draft" if path.suffix == ".draft" else path.name.partition(".1")[0]

    fsync, replace, rmtree = os.fsync, os.replace, shutil.rmtree

    def tell_fsync(handle: int) -> None:
        fsync(handle)
        told.append(f"fsync {name(Path(os.readlink(f'/proc/self/fd/{handle}')))}")

    def tell_replace(source: Path, target: Path) -> None:
        replace(source, target)
        told.append(f"replace {name(source)} {'old' if target.suffix == '.old' else name(target)}")

    def tell_rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path.suffix == ".old":
            told.append("rmtree old")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr("kitforge.foundation.files.os.fsync", tell_fsync)
    monkeypatch.setattr("kitforge.foundation.files.os.replace", tell_replace)
    monkeypatch.setattr("kitforge.foundation.files.shutil.rmtree", tell_rmtree)
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_on_the_disk_before_it_has_its_name_and_so_is_the_name(tmp_path: Path, calls: list[str]) -> None:
    write_text(tmp_path / "file", "text")
    assert calls == ["fsync draft", "replace draft file", "fsync ."]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_folder_is_on_the_disk_before_the_one_that_it_replaces_goes(tmp_path: Path, calls: list[str]) -> None:
    with atomic_folder(tmp_path / "folder"):
        pass
    assert calls == ["fsync draft", "replace draft folder", "fsync ."]
    calls.clear()
    with atomic_folder(tmp_path / "folder"):
        pass
    assert calls[:5] == ["fsync draft", "replace folder old", "replace draft folder", "fsync .", "rmtree old"]
