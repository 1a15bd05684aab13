"""The rooms: none is empty, each has a door and a line in the README, and each stands on its floor."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT

# Folders at the root that are rooms of the project, if not of the package.
YARDS = ("benchmarks", "docs", "examples", "scripts", "tests")
# Test folders that mirror no room, since they look at the whole.
WHOLE = {"architecture", "benchmarks", "differential", "distributed", "documentation", "mutation", "warm"}


def folders(top: Path) -> list[Path]:
    """Every folder below `top`, caches left out."""
    return [path for path in sorted(top.rglob("*")) if path.is_dir() and "__pycache__" not in path.parts]


def room_problems(package: Path) -> list[str]:
    """Folders that hold nothing, or hold code that the house cannot see for want of an `__init__`."""
    found = []
    for folder in folders(package):
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        if all(path.name == "__init__.py" for path in files):
            found.append(f"{folder.name} is empty")
        if any(path.suffix == ".py" for path in files) and not (folder / "__init__.py").exists():
            found.append(f"{folder.name} has no door")
    return found


def readme_tree(text: str) -> dict[str, str]:
    """The folders of the drawn tree, by path from the root, and what each is said to be for."""
    drawing = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.DOTALL)
    assert drawing, "README.md has no fenced block below the comment <!-- tree -->"
    rows, above = {}, dict[int, str]()
    for indent, name, purpose in re.findall(r"^( *)(\S+)/ *(.*)$", drawing[1], re.MULTILINE):
        depth = len(indent) // 2
        above[depth] = f"{above[depth - 1]}/{name}" if depth else name
        rows[above[depth]] = purpose
    return rows


def rooms(package: Path) -> set[str]:
    """The rooms of the package and of its core, as the README calls them."""
    tops = [package, *(path for top in (package, package / "core") for path in top.glob("*") if path.is_dir())]
    return {path.relative_to(package.parent).as_posix() for path in tops if path.name != "__pycache__"}


def contract(name: str, option: str) -> set[str]:
    """The lines of one option of one contract of import-linter."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    return set(parser[f"importlinter:contract:{name}"][option].split("\n")) - {""}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the package in `folder`, under this project's contracts."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_no_room_is_empty() -> None:
    assert not room_problems(PACKAGE)


def test_an_empty_room_and_one_without_a_door_are_found(tmp_path: Path) -> None:
    for path in (
        "core/__init__.py",
        "core/norm.py",
        "kits/__init__.py",
        "data/text.py",
        "models/gpt2/__pycache__/a.pyc",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert room_problems(tmp_path) == ["data has no door", "kits is empty", "models is empty", "gpt2 is empty"]


def test_no_file_lies_loose_beside_the_operations() -> None:
    assert {path.name for path in (PACKAGE / "core" / "kernels").glob("*.py")} == {"__init__.py", "dispatch.py"}


def test_the_tree_in_the_readme_is_the_tree_that_stands() -> None:
    drawn = readme_tree((ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(drawn) == rooms(PACKAGE) | {yard for yard in YARDS if (ROOT / yard).is_dir()}
    assert all(drawn.values()), "every folder of the tree has a line of purpose"


def test_a_room_that_is_drawn_with_its_place_is_read_with_its_place() -> None:
    drawing = "kitforge/  the package\n  cli.py    commands\n  core/     sums\n    nn/     layers\ndocs/\n"
    rows = readme_tree(f"<!-- tree -->\n```\n{drawing}```\n")
    assert rows == {"kitforge": "the package", "kitforge/core": "sums", "kitforge/core/nn": "layers", "docs": ""}


@pytest.mark.parametrize("yard", ["tests", "benchmarks"])
def test_tests_and_benchmarks_mirror_the_rooms(yard: str) -> None:
    inside = {path.name for path in (ROOT / yard).glob("*") if path.is_dir() and path.name != "__pycache__"}
    # The parallel core and each kit are large enough to have a yard of their own; so are measurements on a GPU.
    kits = {path.name for path in (PACKAGE / "kits").iterdir() if path.is_dir()}
    assert inside <= {path.name for path in PACKAGE.iterdir()} | WHOLE | kits | {"parallel", "gpu"}


# All at once: import-linter names each.
PLANTED = [
    ("foundation/seed.py", "import kitforge.core.nn"),
    ("data/text/packing.py", "import kitforge.report"),
    ("data/tokenizers/folder.py", "import kitforge.data.text.packing"),
    ("data/tables/source.py", "import kitforge.data.text.token_cache"),
    ("data/source.py", "import kitforge.data.labels, kitforge.data.chat.rows"),
    ("trainer/loop.py", "import kitforge.models.catalog"),
    ("core/optim/muon.py", "def f():\n    import kitforge.core.nn"),
    ("trainer/loop.py", "import omegaconf"),
    ("models/gpt2/model.py", "import kitforge.data"),
    ("attic/__init__.py", ""),
]


def test_every_import_goes_down() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_planted_upward_and_sideways_imports_are_caught(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kitforge", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    for path, line in PLANTED:
        file = tmp_path / "kitforge" / path
        file.parent.mkdir(exist_ok=True)
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")
    found = lint(tmp_path).stdout
    for path, line in PLANTED:
        module = ".".join(Path("kitforge", path).with_suffix("").parts)
        assert (f"{module} -> {line.split()[-1]}" if line else "- kitforge.attic") in found


def test_the_contract_on_hydra_covers_every_room() -> None:
    built = {f"kitforge.{path.name}" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    # The command line and its contracts stand above the room that composes with Hydra.
    assert contract("hydra", "source_modules") == built - {"kitforge.cli", "kitforge.verify"}
