"""The reward `python_tests`: whether the code of a completion passes the tests of its row, each in a sandbox."""

import ast
import builtins
import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from kitforge.foundation.errors import ConfigError, DataError, TrainingError
from kitforge.kits.rlhf.config import PythonTestsOptions

OUTCOMES = ("pass", "fail", "timeout", "memory", "blocked")
# Seconds for the start of the processes, which do not count as theirs.
START_TIMEOUT = 120.0
_COMMAND = [sys.executable, "-I", "-S", str(Path(__file__).with_name("code_worker.py"))]
_BLOCK = re.compile(r"^[ \t]*```[^`\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_log = logging.getLogger(__name__)


class PythonTests:
    """Runs programs with their tests, as many at a time as there are cores."""

    def __init__(self, options: PythonTestsOptions) -> None:
        """Raises ConfigError if this machine cannot isolate processes, unless the options allow that."""
        self._limits = {**asdict(options), "cpu_seconds": math.ceil(options.timeout) + 1, "is_isolated": True}
        found, failure = self._run(job_of({"tests": "assert f"}, "f = 1"))
        if found is None and not options.allow_unisolated:
            raise ConfigError(
                "reward=python_tests cannot isolate the code of completions on this machine",
                got=failure,
                expected="Linux that lets this user make namespaces of users, mounts, processes and networks",
                fix="allow them (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, a container's "
                "seccomp profile), or add python_tests.allow_unisolated=true: the code then has your files and network",
            )
        if found is None:
            self._limits["is_isolated"] = False
            _log.warning("code of completions has your files and your network: nothing isolates it here (%s)", failure)

    def outcomes(self, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
        """The outcome of each job, one of `OUTCOMES`. Raises TrainingError if its processes do not start."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            found = list(pool.map(self._run, jobs))
        if failures := [failure for outcome, failure in found if outcome is None]:
            raise TrainingError("the processes of reward=python_tests do not start", got=failures[0])
        return [outcome for outcome, _ in found if outcome is not None]

    def check_solutions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError for a row whose tests do not compile, or fail with the code of its column `solution`."""
        jobs = [(row, job_of(row, row.get("solution") or "")) for row in rows]
        solved = [(row, job) for row, job in jobs if row.get("solution")]
        for (row, _), outcome in zip(solved, self.outcomes([job for _, job in solved]), strict=True):
            if outcome != "pass":
                raise _refusal(row, f"has a solution whose outcome is {outcome}", row["solution"], "one that passes")

    def _run(self, job: Mapping[str, Any]) -> tuple[str | None, str]:
        """The outcome; None with the reason if the processes do not start."""
        pipe, marker = subprocess.PIPE, secrets.token_hex(16)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            lines = [{**self._limits, "folder": folder}, {**job, "marker": marker}]
            process = subprocess.Popen(
                _COMMAND, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", start_new_session=True
            )
            try:
                written = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
                said, failure = process.communicate(written, START_TIMEOUT + self._limits["timeout"])
            except subprocess.TimeoutExpired as error:
                said, failure = error.stdout or b"", b"no answer"
            finally:
                # And what else its session still holds.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        found = [each.removeprefix(f"{marker} ") for each in said.decode().splitlines() if each.startswith(marker)]
        # Behind "ready" is an outcome, unless a process has ended.
        return (found + ["fail"])[1] if found else None, failure.decode(errors="replace").strip().rpartition("\n")[2]


@cache
def runner_of(options: PythonTestsOptions) -> PythonTests:
    """The runner of this process."""
    return PythonTests(options)


def code_of(completion: str) -> str:
    """The code of a completion: its last fenced block, which may be left open; without one, all of it."""
    blocks = _BLOCK.findall(completion)
    return "\n" + blocks[-1] if blocks else completion


def job_of(row: Mapping[str, Any], code: str) -> dict[str, Any]:
    """What runs the tests of a row on code. Raises DataError for tests that do not compile or test nothing."""
    tests, prefix, entry_point = row.get("tests"), row.get("code_prefix") or "", row.get("entry_point")
    tests = tests if isinstance(tests, str) else "\n".join(map(str, tests or ()))
    tree = _parsed(tests)
    if tree is None:
        raise _refusal(row, "has tests that do not compile", tests, "Python")
    known = (_parsed(prefix + (row.get("solution") or "")) or _parsed(prefix) or ast.parse("")).body
    asked = {entry_point, *(each.name for each in known if isinstance(each, (ast.FunctionDef, ast.ClassDef)))}
    named = {alias.name for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for alias in each.names}
    named |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    # Built-in names and modules are the tests' own, unless a program is to define them.
    modules = sorted((named & sys.stdlib_module_names) - asked)
    calls = list(filter(None, (_call(each, entry_point) for each in tree.body)))
    if not calls and all(
        isinstance(each, (ast.FunctionDef, ast.ImportFrom, ast.Import, ast.Assign)) for each in tree.body
    ):
        raise _refusal(
            row,
            "has tests that test nothing",
            tests,
            "such as `assert f(1) == 2`; check(candidate) needs a column entry_point",
        )
    return {
        "program": prefix + code,
        "prefix": prefix if _parsed(prefix) else "",
        "tests": "\n".join([*(f"import {each}" for each in modules), tests, *calls]),
        "entry_point": entry_point,
        "names": sorted(each for each in named.difference(modules) if each in asked or not hasattr(builtins, each)),
    }


def _call(statement: ast.stmt, entry_point: str | None) -> str:
    """What runs a function or a class of tests, which by itself does nothing."""
    name = getattr(statement, "name", "")
    if isinstance(statement, ast.ClassDef):
        run = f"defaultTestLoader.loadTestsFromTestCase({name}).run(unittest.TestResult())"
        return f"if hasattr({name}, 'assertEqual'):\n    import unittest\n    assert unittest.{run}.wasSuccessful()"
    if name == "check":
        return f"check({entry_point})" if entry_point else ""
    return f"{name}()" if name.startswith("test") else ""


def python_tests(
    *,
    completions: Sequence[str],
    tests: Sequence[Any],
    entry_point: Sequence[Any] | None = None,
    code_prefix: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    runner: PythonTests,
) -> list[dict[str, float]]:
    """Per completion 1 if its code passes the tests of its row, else 0; and for each outcome whether it was that."""
    columns = {"tests": tests, "entry_point": entry_point, "code_prefix": code_prefix, "solution": solution}
    rows = [{name: each[row] for name, each in columns.items() if each} for row in range(len(completions))]
    found = runner.outcomes([job_of(row, code_of(text)) for row, text in zip(rows, completions, strict=True)])
    return [{"score": float(each == "pass"), **{name: float(each == name) for name in OUTCOMES}} for each in found]


def _parsed(source: str) -> ast.Module | None:
    with warnings.catch_warnings(), suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")
        return ast.parse(source)
    return None


def _refusal(row: Mapping[str, Any], what: str, got: str, expected: str) -> DataError:
    named = next(
        (f"{name} {row[name]!r}" for name in ("task_id", "id", "entry_point") if row.get(name)), repr(row.get("tests"))
    )
    return DataError(
        f"the row with {named[:80]} {what}", got=got[-200:], expected=expected, fix="correct it or leave it out"
    )
