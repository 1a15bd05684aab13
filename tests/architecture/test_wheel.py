"""The wheel: whole, lean, and at work where no checkout is."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT
from tests.architecture.test_rooms import readme_tree

pytestmark = pytest.mark.slow
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([*PIP, "install", "--no-compile", "--no-deps", "--target", str(folder), str(wheel)], check=True)
    return folder


def run(elsewhere: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(elsewhere)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_wheel_holds_every_file_of_the_package_and_no_other(names: set[str]) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".yaml") for name in wanted)


def test_the_wheel_carries_its_licence_and_its_command(names: set[str], wheel: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"kitforge = kitforge.cli.main:main" in zipfile.ZipFile(wheel).read(entries)


def test_the_tree_in_the_readme_is_the_tree_in_the_wheel(names: set[str]) -> None:
    drawn = {path for path in readme_tree((ROOT / "README.md").read_text(encoding="utf-8")) if path[:8] == "kitforge"}
    held = {"/".join(name.split("/")[:depth]) for name in names for depth in (1, 2, 3) if name.count("/") >= depth}
    assert drawn == {path for path in held if path.count("/") < 2 or path.startswith("kitforge/core/")} - dist_info(
        held
    )


def dist_info(paths: set[str]) -> set[str]:
    return {path for path in paths if ".dist-info" in path}


def test_the_installed_wheel_imports_and_lists_what_it_can_do(elsewhere: Path, tmp_path: Path) -> None:
    assert str(elsewhere) in run(elsewhere, tmp_path, "-c", "import kitforge; print(kitforge.__file__)")
    assert "llama_tiny" in run(elsewhere, tmp_path, "-m", "kitforge", "list")
