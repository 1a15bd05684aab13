"""What a change reaches: every module reaches a test, and a test is reached by all that it imports when it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reached import ROOT, TABLES, closure, parsed, reached

# Tests of a leaf, of a table of names, and of whole runs.
SAMPLE = ("tests/core/optim/test_schedules.py", "tests/models/test_vit.py", "tests/kits/recommender/test_features.py")


# Prints what each of its arguments imports, in a copy of a process that has imported torch.
IMPORTED = """
import importlib, os, sys, torch

for module in sys.argv[1:]:
    if process := os.fork():
        assert os.waitpid(process, 0)[1] == 0
        continue
    importlib.import_module(module)
    print(*(each.__file__ for each in sys.modules.values() if getattr(each, "__file__", 0)), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, str]:
    command = [sys.executable, "-c", IMPORTED, *(test.removesuffix(".py").replace("/", ".") for test in SAMPLE)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(zip(SAMPLE, printed.splitlines(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("test", SAMPLE)
def test_what_a_test_imports_is_reached_unless_a_table_imports_it_by_name(test: str, imported: dict[str, str]) -> None:
    files = imported[test].split()
    here = [Path(each) for each in files if Path(each).is_relative_to(ROOT) and ".venv" not in each]
    loaded = {str(each.relative_to(ROOT)) for each in here if each.name != "__init__.py"}
    lost = loaded - closure(ROOT, test)
    entries = {each for each in lost if str(Path(each).parents[1]) in {folder for folder, _ in TABLES.values()}}
    assert lost - entries - {each for entry in entries for each in parsed(ROOT, entry)[0]} == set()
    assert len(loaded) > 3


def test_every_module_reaches_a_test() -> None:
    closures = [closure(ROOT, str(each.relative_to(ROOT))) for each in (ROOT / "tests").rglob("test_*.py")]
    modules = {str(each.relative_to(ROOT)) for each in (ROOT / "kitforge").rglob("*.py")}
    lost = modules - set().union(*closures)
    assert {each for each in lost if not each.endswith("__init__.py")} == {"kitforge/__main__.py"}


@pytest.mark.parametrize(
    ("changed", "some", "none"),
    [
        ("kitforge/models/glm/convert.py", "tests/models/test_chatglm.py", "tests/kits/recommender/test_features.py"),
        ("kitforge/core/kernels/unique/numba.py", "tests/core/kernels/test_unique.py", "tests/models/test_chatglm.py"),
        ("kitforge/configs/model/qwen2_0_5b.yaml", "tests/test_composition.py", "tests/core/optim/test_schedules.py"),
        ("docs/verify.md", "tests/documentation/test_frames.py", "tests/models/test_chatglm.py"),
        ("tests/models/test_chatglm.py", "tests/models/test_chatglm.py", "tests/models/test_vit.py"),
    ],
)
def test_a_change_reaches_its_own_tests_and_not_those_of_others(changed: str, some: str, none: str) -> None:
    found = reached([changed])
    assert some in found
    assert none not in found


def test_what_every_test_stands_on_reaches_all_tests() -> None:
    assert reached(["tests/conftest.py"]) == reached(["pyproject.toml"])
    assert len(reached(["tests/conftest.py"])) == sum(1 for _ in (ROOT / "tests").rglob("test_*.py"))
