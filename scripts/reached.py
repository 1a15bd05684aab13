"""Print the test files that a change reaches: `python scripts/reached.py [FILE ...]`, by default what main has not.

A test file reaches what it imports, and what that imports in turn. The modules of `TABLES` import whatever a name may
ask for; through them a test reaches only the entries whose names (a task, a family, an operation) stand in it, or the
defaults. Files that are no module reach the tests that name them. What every test stands on reaches all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The folder of the entries of a table, and the entries of a test that names none.
TABLES = {
    "kitforge/kits/registry.py": ("kitforge/kits", {"transformers"}),
    "kitforge/models/catalog.py": ("kitforge/models", {"llama"}),
    "kitforge/core/kernels/dispatch.py": ("kitforge/core/kernels", set[str]()),
}
GROUND = re.compile(
    r"pyproject\.toml|Makefile|\.ci/.*|constraints.*|(.*/)?conftest\.py|tests/warm/.*|tests/patience\.py"
)
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def reached(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """The test files, as paths from the root, that the changed files reach; paths from the root as well."""
    wanted, found = set(changed), set[str]()
    tests = sorted(str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py"))
    if any(GROUND.fullmatch(each) for each in wanted):
        return tests
    others = {each for each in wanted if not each.endswith(".py") or not each.startswith(("kitforge/", "tests/"))}
    for test in tests:
        modules = closure(root, test)
        words = set[str]().union(*(parsed(root, each)[1] for each in modules if each.startswith("tests/")))
        if wanted & modules or any(_concerns(test, words, modules, each) for each in others):
            found.add(test)
    return sorted(found)


@cache
def closure(root: Path, test: str) -> set[str]:
    """The test file, and every file of the repository that it imports, directly or not, or asks a table for by name."""
    seen, waiting = set[str](), [test]
    words, tables = set[str](), set[str]()
    while waiting or tables:
        if not waiting:
            # Tables come last, when all words are known.
            waiting += [each for table in tables for each in _entries(root, table, words)]
            tables = set()
            continue
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        imported, found = parsed(root, path)
        if path.startswith("tests/"):
            words |= found
        if path in TABLES:
            tables.add(path)
            imported = [each for each in imported if not _entry_of(path, each)]
        waiting += imported
    return seen


def _entries(root: Path, table: str, words: set[str]) -> list[str]:
    folder, default = TABLES[table]
    named = {
        name
        for name, known in _known(root, table).items()
        if known & words or any(each.startswith(f"{name}_") for each in words)
    } or default
    return [str(each.relative_to(root)) for name in named for each in (root / folder / name).rglob("*.py")]


@cache
def _known(root: Path, table: str) -> Mapping[str, set[str]]:
    # By entry of the table, the words that ask for it: its own name, presets of a family, tasks of a kit.
    folder = root / TABLES[table][0]
    known = {path.parent.name: {path.parent.name} for path in folder.glob("*/*.py")}
    for preset in (root / "kitforge/configs/model").glob("*.yaml"):
        family = re.match(r"family: *(\w+)", preset.read_text(encoding="utf-8"))
        known.get(family[1] if family else "", set()).add(preset.stem)
    for build in folder.glob("*/build.py"):
        known[build.parent.name] |= _constants(build) & _constants(root / table)
    return known


def _entry_of(table: str, path: str) -> bool:
    folder = Path(TABLES[table][0])
    return folder in Path(path).parents and Path(path).parent != folder


@cache
def parsed(root: Path, path: str) -> tuple[list[str], set[str]]:
    """The files of the repository that a module imports, and the words of its names and texts."""
    imported, words = list[str](), set[str]()
    waiting: list[ast.AST] = [ast.parse((root / path).read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            imported += [found for each in node.names if (found := _file(root, each.name))]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [_file(root, f"{node.module}.{each.name}") or _file(root, node.module) for each in node.names]
            imported += [each for each in names if each]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            words.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(WORD.findall(node.value))
            if re.fullmatch(r"kitforge(\.\w+)+", node.value) and (found := _file(root, node.value)):
                imported.append(found)  # by `import_optional`
            # A verb of the command line is imported when it is typed.
            if verb := re.fullmatch(r"(cli\.\w+):\w+", node.value):
                imported += [found for each in verb.groups() if (found := _file(root, f"kitforge.{each}"))]
    return imported, words


def _file(root: Path, module: str) -> str:
    if not module.startswith(("kitforge", "tests", "benchmarks", "scripts", "examples")):
        return ""
    path = module.replace(".", "/")
    return next((each for each in (f"{path}.py", f"{path}/__init__.py") if (root / each).is_file()), "")


def _constants(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _concerns(test: str, words: set[str], modules: set[str], path: str) -> bool:
    # Of a file that is no module: a page, a preset, or what lies beside a module that reads it.
    if path.endswith(".md") or path.startswith("docs/"):
        return test.startswith(("tests/documentation/", "tests/architecture/"))
    if path.startswith("kitforge/configs/"):
        return Path(path).stem in words or "configs" in words
    return Path(path).stem in words or str(Path(path).parent) in {str(Path(each).parent) for each in modules}


def _changed() -> list[str]:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    main = "origin/main" if git("branch", "--remotes", "--list", "origin/main") else "main"
    base = git("merge-base", "HEAD", main).strip()
    return (git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")).split()


if __name__ == "__main__":
    print("\n".join(reached(sys.argv[1:] or _changed())))
