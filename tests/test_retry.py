"""A test that failed by chance is named and passes; one that fails twice fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "retry_failed.py"
TESTS = """
from pathlib import Path

import pytest


def test_sound():
    pass


@pytest.mark.parametrize("case", ["a b", "c::d"])
def test_flaky(case):
    seen = Path(case.replace(":", "") + ".seen")
    known = seen.exists()
    seen.touch()
    assert known


def test_broken():
    assert BROKEN
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_only_what_fails_twice_fails(tmp_path: Path, is_broken: bool) -> None:
    (tmp_path / "test_few.py").write_text(TESTS.replace("BROKEN", str(not is_broken)))
    assert pytest_in(tmp_path, "-m", "pytest", "-q").returncode == 1
    done = pytest_in(tmp_path, str(SCRIPT))
    assert done.returncode == int(is_broken)
    assert done.stdout.count("FLAKY test_few.py::test_flaky[") == 2
    assert ("FAILED TWICE test_few.py::test_broken" in done.stdout) == is_broken


def test_without_a_list_of_failures_nothing_is_forgiven(tmp_path: Path) -> None:
    assert pytest_in(tmp_path, str(SCRIPT)).returncode == 1


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Plugins take most of a start.
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=plain, capture_output=True, text=True)
