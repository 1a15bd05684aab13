"""Every benchmark runs with --smoke: our side alone, at its smallest sizes, without writing anything."""

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.command_line import CommandLine
from tests.differential.drawn import WHOLE
from tests.documentation.markdown import ROOT, pages
from tests.warm.shell import Run

FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))
# Run under the interpreter of a peer, whose packages they import.
PEERS = [path for path in FILES if re.search(r"(^|_)peers?($|_)", path.stem)]
SCRIPTS = [path for path in FILES if path not in PEERS and '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
# A command in a page or a docstring, up to the end of its code or of its line.
COMMAND = re.compile(r"python -m benchmarks\.[^`\n;]*")


def name(path: Path) -> str:
    """The dotted name of a script, as `python -m` takes it."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def written() -> dict[Path, float]:
    """Every file below benchmarks, and when it was written last."""
    files = (path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path: path.stat().st_mtime for path in files}


def imported(path: Path) -> Iterator[str]:
    """The names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def commands() -> Iterator[tuple[str, str]]:
    """Every command that starts a benchmark, in the pages and in the scripts' docstrings, and where it stands."""
    texts = {path: path.read_text(encoding="utf-8") for path in pages()}
    texts |= {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in SCRIPTS}
    for path, text in texts.items():
        for match in COMMAND.finditer(text):
            yield path.relative_to(ROOT).as_posix(), match[0]


COMMANDS = sorted(set(commands()))
# That the others are imported and take their options is seen below.
SAMPLE = SCRIPTS if WHOLE else SCRIPTS[1::8]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.usefixtures("may_shorten")
@pytest.mark.parametrize("script", SAMPLE, ids=name)
def test_the_benchmark_runs_and_writes_nothing(script: Path, tmp_path: Path, run: Run) -> None:
    before = written()
    run(["python", "-m", name(script), "--smoke"], tmp_path)
    assert written() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_the_script_reads_the_shared_options(script: Path) -> None:
    # Without them it would take --smoke for nothing, and run whole.
    assert re.search(r"\b(CommandLine|Comparison)\(", script.read_text(encoding="utf-8"))


def test_a_file_that_is_no_script_serves_one() -> None:
    callers = [*SCRIPTS, ROOT / "scripts" / "gpu_check.py", FOLDER / "gpu" / "kernels.py"]
    used = {each for path in callers for each in imported(path)} | {"benchmarks.command_line"}
    others = {name(path) for path in FILES if path not in SCRIPTS and path not in PEERS}
    assert others <= used


class ParsedError(Exception):
    """Ends a script once its arguments are known."""


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_the_options_of_a_command_exist(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = CommandLine.parse

    def parse_only(parser: CommandLine, *given: Any) -> None:
        parse(parser, *given)
        raise ParsedError

    # What may be left out is given, and of several words the first.
    module, *arguments = shlex.split(re.sub(r"[][]|\|\w+|\.\.\.", " ", command), comments=True)[2:]
    monkeypatch.setattr(CommandLine, "parse", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ParsedError):
        runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_the_docstring_says_how_to_run_it(script: Path) -> None:
    assert any(words.startswith(f"python -m {name(script)}") for page, words in COMMANDS if page.endswith(".py"))
