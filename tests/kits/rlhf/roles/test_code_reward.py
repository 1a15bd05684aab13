"""The reward `python_tests`: programs that try to pass without being right, and verdicts equal to a plain run."""

import logging
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitforge.foundation.errors import ConfigError, DataError, TrainingError
from kitforge.kits.rlhf.config import PythonTestsOptions
from kitforge.kits.rlhf.roles import code_reward, code_worker
from kitforge.kits.rlhf.roles.code_reward import OUTCOMES, PythonTests, code_of, job_of, python_tests
from tests.kits.rlhf import runs

SQUARES = {"tests": "assert f(2) == 4\nassert f(3) == 9\nassert f(-5) == 25"}
RIGHT = "def f(x): return x * x\n"
# A worker on a machine that allows no namespaces.
WITHOUT_NAMESPACES = """
import ctypes, runpy, sys

class Libc(ctypes.CDLL):
    def unshare(self, flags):
        ctypes.set_errno(1)
        return -1

ctypes.CDLL = Libc
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def refuse_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    *start, worker = code_reward._COMMAND
    monkeypatch.setattr(code_reward, "_COMMAND", [*start, "-c", WITHOUT_NAMESPACES, worker])


def isolated(**options: Any) -> PythonTests | None:
    """None where this machine cannot isolate, which is then refused in words."""
    try:
        return PythonTests(PythonTestsOptions(**options))
    except ConfigError as error:
        assert "cannot isolate" in str(error) and "python_tests.allow_unisolated=true" in str(error)
        return None


@pytest.fixture(scope="module", params=["isolated", "unisolated"])
def runner(request: pytest.FixtureRequest) -> PythonTests:
    """Both ways; where this machine cannot isolate, the second one twice."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "isolated" and (found := isolated(timeout=60.0)):
            return found
        refuse_namespaces(monkeypatch)
        return PythonTests(PythonTestsOptions(timeout=60.0, allow_unisolated=True))


def outcome(runner: PythonTests, program: str, row: dict[str, Any] = SQUARES) -> str:
    return runner.outcomes([job_of(row, program)])[0]


# What a program may try, and what becomes of it: tests are appended, so that ending early would leave them out; the
# verdict is no exit status; and `==` is not the program's.
HACKS = {
    "sys.exit(0)": ("import sys\nsys.exit(0)", "fail"),
    "sys.exit(0) in a call": ("import sys\ndef f(x): sys.exit(0)", "fail"),
    "os._exit(0)": ("import os\nos._exit(0)", "fail"),
    "os._exit(0) in a call": ("import os\ndef f(x): os._exit(0)", "fail"),
    "SystemExit in a thread": (
        "import threading\ndef f(x): raise SystemExit(0)\nthreading.Thread(target=f, args=[1]).start()",
        "fail",
    ),
    "__eq__": ("class Equal:\n    def __eq__(self, other): return True\ndef f(x): return Equal()", "fail"),
    "__eq__ of an int": ("class Equal(int):\n    __eq__ = lambda *_: True\ndef f(x): return Equal()", "fail"),
    "builtins": ("import builtins\nbuiltins.AssertionError = builtins.all = print\ndef f(x): return 0", "fail"),
    "unittest and pytest": (
        "import sys, types, unittest\nunittest.TestCase.assertEqual = print\n"
        "sys.modules['pytest'] = types.ModuleType('pytest')\ndef f(x): return 0",
        "fail",
    ),
    "a guess of the marker": (
        "import os, sys\nfor _ in range(9): print('0' * 32, 'pass')\n"
        "for to in range(256):\n    try: os.write(to, b'0' * 32 + b' pass\\n')\n    except OSError: pass\n"
        "def f(x): return 0",
        "fail",
    ),
    "answers before questions": (
        "import os\nfor to in range(3, 256):\n    try: os.write(to, b'[\"value\", true]\\n' * 9)\n"
        "    except OSError: pass\ndef f(x): return 0",
        "fail",
    ),
    "a crash": ("import ctypes\nctypes.string_at(0)", "fail"),
    "no Python": ("def f(x) return", "fail"),
    "nothing": ("", "fail"),
    "right": (RIGHT, "pass"),
    "wrong": ("def f(x): return x + x", "fail"),
}
SLOW_HACKS = {
    "a loop that ignores signals": (
        "import signal\nfor each in range(1, 32):\n    try: signal.signal(each, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        "timeout",
    ),
    "sleep in a call": ("import time\ndef f(x): time.sleep(600)", "timeout"),
    "much memory": ("held = bytearray(2**34)", "memory"),
    "more and more memory": ("held = []\ndef f(x):\n    while True: held.append(bytearray(2**24))", "memory"),
    "a gigabyte of output": (f"import sys\nfor _ in range(1024): sys.stdout.write('x' * 2**20)\n{RIGHT}", "pass"),
    "a large file": ("with open('large', 'wb') as file:\n    while True: file.write(b'x' * 2**20)", "blocked"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HACKS)
def test_a_program_cannot_pass_without_being_right(name: str, runner: PythonTests) -> None:
    program, wanted = HACKS[name]
    assert outcome(runner, program) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_HACKS)
def test_what_a_program_takes_is_limited_and_counted(name: str) -> None:
    program, wanted = SLOW_HACKS[name]
    options: dict[str, Any] = {"timeout": 1.0 if wanted == "timeout" else 60.0, "memory_bytes": 2**28}
    runner = isolated(**options) or PythonTests(PythonTestsOptions(**options, allow_unisolated=True))
    assert outcome(runner, program) == wanted


# Each looks for the tests, and answers rightly if it has found them. The expression does not match itself.
SEARCHES = {
    "frames": "def f(x):\n    frame, seen = sys._getframe(), ''\n    while frame:\n"
    "        seen += repr((frame.f_code.co_consts, list(frame.f_locals.values()), list(frame.f_globals.items())))\n"
    "        frame = frame.f_back\n    return x * x if TESTS.search(seen) else 0",
    "gc": "def f(x):\n    seen = [repr(each) for each in gc.get_objects() if type(each) in (dict, list, tuple)]\n"
    "    return x * x if any(map(TESTS.search, seen)) else 0",
    "inspect": "def f(x):\n    import inspect\n    seen = repr([each.code_context for each in inspect.stack()])\n"
    "    return x * x if TESTS.search(seen) else 0",
    "memory of processes": "def f(x):\n    for each in ['self', os.getppid()]:\n"
    "        for line in open(f'/proc/{each}/maps'):\n"
    "            first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
    "            if 'rw' not in line: continue\n            with open(f'/proc/{each}/mem', 'rb') as file:\n"
    "                file.seek(first)\n"
    "                if TESTS.search(file.read(last - first).decode('latin-1')): return x * x\n    return 0",
    "inputs of processes": "def f(x):\n    for each in os.listdir('/proc'):\n        try:\n"
    "            file = os.open(f'/proc/{each}/fd/0', os.O_RDONLY | os.O_NONBLOCK)\n"
    "            seen = os.read(file, 2**20).decode('latin-1')\n        except OSError: continue\n"
    "        if TESTS.search(seen): return x * x\n    return 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_a_program_cannot_read_its_tests(name: str, runner: PythonTests) -> None:
    program = f"import gc, os, re, sys\nTESTS = re.compile(r'f\\(-[5]\\) == 2')\n{SEARCHES[name]}"
    assert outcome(runner, program) in ("fail", "blocked")


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is that of Linux")
def test_a_right_that_cannot_be_given_up_ends_the_program_before_it_runs() -> None:
    with pytest.raises(OSError, match="prctl: Invalid argument"):
        code_worker._call("prctl", -1, 0, 0, 0, 0)


@pytest.mark.slow
def test_an_isolated_program_has_no_network_no_files_and_no_processes(tmp_path: Path) -> None:
    """Where the machine cannot isolate, `isolated` has seen the refusal."""
    if not (runner := isolated(timeout=60.0)):
        return
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n{RIGHT}"
        assert outcome(runner, connects) in ("fail", "blocked")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    for name in (tmp_path / "made", Path(sys.base_prefix) / "made", Path("/usr/made")):
        assert outcome(runner, f"open({str(name)!r}, 'w')\n{RIGHT}") in ("fail", "blocked")
        assert not name.exists()
    secret = tmp_path / "secret"
    secret.write_text("what no program sees")
    assert outcome(runner, f"open({str(secret)!r}).read()\n{RIGHT}") == "fail"
    # Its own folder it may use, with at most so many processes, none of which outlives it.
    assert outcome(runner, f"open('made', 'w').write('x')\n{RIGHT}") == "pass"
    assert outcome(runner, "import os\nwhile True: os.fork()") == "blocked"
    seconds = 100000 + os.getpid()
    outlives = "import os\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    outlives += f"        os.execv('/usr/bin/sleep', ['sleep', '{seconds}'])\n    os._exit(0)\n{RIGHT}"
    assert outcome(runner, outlives) == "pass"
    assert not [each for each in commands() if f"sleep\0{seconds}" in each]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="rights of a process are Linux's")
def test_a_program_has_no_rights_and_cannot_get_any(runner: PythonTests) -> None:
    looks = """
import ctypes, resource
libc, held = ctypes.CDLL(None), (ctypes.c_uint32 * 6)(*[1] * 6)
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522)), ctypes.byref(held))
bounds = [resource.getrlimit(each) for each in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)]
is_bound = bounds == [(0, 0), (2**26, 2**26), (MEMORY, MEMORY)]
f = lambda x: x * x if libc.prctl(39, 0, 0, 0, 0) == 1 and not any(held) and is_bound else 0
"""
    assert outcome(runner, looks.replace("MEMORY", str(PythonTestsOptions().memory_bytes))) == "pass"


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_machine_that_cannot_isolate_is_refused_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_namespaces(monkeypatch)
    with pytest.raises(ConfigError, match="cannot isolate") as caught:
        PythonTests(PythonTestsOptions())
    assert "unshare: Operation not permitted" in str(caught.value)
    code_reward.runner_of.cache_clear()
    allowed = PythonTestsOptions(allow_unisolated=True)
    with caplog.at_level(logging.WARNING):
        runners = [code_reward.runner_of(allowed) for _ in range(2)]
    code_reward.runner_of.cache_clear()
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert [outcome(runners[1], each) for each in (RIGHT, "def f(x): return x")] == ["pass", "fail"]


@pytest.mark.slow
def test_processes_that_do_not_start_later_are_no_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PythonTests(PythonTestsOptions(allow_unisolated=True))
    monkeypatch.setattr(code_reward, "_COMMAND", [sys.executable, "-c", "raise SystemExit('no processes left')"])
    with pytest.raises(TrainingError, match="no processes left"):
        outcome(runner, RIGHT)


def test_the_code_is_the_last_fenced_block_or_all_of_a_completion() -> None:
    text = "First\n```python\na = 1\n```\nno:\n  ```py\nb = '`'\n```\nso."
    assert code_of(text) == "\nb = '`'\n"
    assert code_of("```\nc = 1\n") == "\nc = 1\n"
    assert code_of("    return 1\n") == "    return 1\n"


HUMAN_EVAL = {
    "task_id": "Test/1",
    "code_prefix": 'import math\n\ndef area(r):\n    return math.pi * r * r\n\ndef radius(a):\n    """Inverse."""\n',
    "solution": "    return math.sqrt(a / math.pi)\n",
    "entry_point": "radius",
    "tests": "def check(candidate):\n    assert abs(area(candidate(3.0)) - 3.0) < 1e-6\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, None),
        ({"solution": "    return a\n"}, "Test/1.* has a solution whose outcome is fail"),
        ({"tests": "def check(candidate) assert"}, "Test/1.* has tests that do not compile"),
        ({"tests": "import math\ndef f(x): return x"}, "Test/1.* has tests that test nothing"),
        ({"entry_point": None}, "Test/1.* has tests that test nothing"),
        ({"tests": []}, "Test/1.* has tests that test nothing"),
    ],
)
def test_rows_whose_tests_cannot_tell_are_refused_by_name(
    change: dict[str, Any], wanted: str | None, runner: PythonTests
) -> None:
    row = {**HUMAN_EVAL, **change}
    if wanted is None:
        runner.check_solutions([row])
        return
    with pytest.raises(DataError, match=wanted):
        runner.check_solutions([HUMAN_EVAL, row])


@pytest.mark.slow
def test_helpers_and_built_in_names_of_the_tests_are_their_own(runner: PythonTests) -> None:
    def given(code: str, **change: Any) -> str:
        return outcome(runner, code, {**HUMAN_EVAL, **change})

    assert given(HUMAN_EVAL["solution"]) == "pass"
    assert given("    return 0\ndef area(r): return 3.0\n") == "fail"
    assert given("    return 0\ndef abs(x): return 0\n") == "fail"
    assert (
        given("    return 0\nclass math:\n    isclose = lambda *_: True\n", tests="assert math.isclose(radius(3), 1)")
        == "fail"
    )
    # Unless the program is to define it.
    assert (
        outcome(
            runner,
            "def sum(a, b): return a + b",
            {"tests": ["assert sum(1, 2) == 3"], "solution": "def sum(a, b): ..."},
        )
        == "pass"
    )


STYLES = {
    "functions of pytest": "from solution import f\n\ndef test_two():\n    assert f(2) == 4\n",
    "a class of unittest": "import unittest\n\nclass Squares(unittest.TestCase):\n"
    "    def test(self): self.assertEqual(f(2), 4)\n",
    "a list of statements": ["assert f(2) == 4", "assert f(3) == 9"],
}


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_tests_may_be_written_in_every_style(style: str, runner: PythonTests) -> None:
    row = {"tests": STYLES[style]}
    assert [outcome(runner, each, row) for each in (RIGHT, "def f(x): return 0")] == ["pass", "fail"]


# Programs with their tests: what crosses from one process to the other and back.
VALUES = [
    (
        "def f(x): return x",
        "for each in (1, -0.0, 2**70, 'ä\\udc80', b'\\xff', 1j, None, True, (1, [2, {3}]), {(1,): frozenset()}):\n"
        "    assert f(each) == each and type(f(each)) is type(each)",
    ),
    ("def f(x): return x", "assert f((1, 2)) != [1, 2]"),
    ("def f(x): x.sort()", "given = [3, 1]\nassert f(given) is None and given == [1, 3]"),
    ("def f(x): x[0][0] = 7", "given = [[1]]\nf(given)\nassert given == [[7]]"),
    ("def f(x): x.pop('a')", "given = {'a': 1}\nf(given)\nassert given == {}"),
    ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
    ("def f(a): return lambda b: a + b", "assert f(1)(2) == 3"),
    ("import collections\ndef f(x): return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    (
        "class P:\n    def __init__(self, x): self.x = x\n    def add(self, y): self.x += y\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __len__(self): return self.x\n"
        "    def __str__(self): return str(self.x)",
        "p = P(x=1)\np.add(2)\nassert p.x == 3 and p == P(3) and p != P(4) and len(p) == 3 and str(p) == '3' and p\n"
        "p.x = 0\nassert not p",
    ),
    (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
    ),
    ("def f(x): return 1 / x", "try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nassert f(2) == 0.5"),
    ("def f(*a, k=1, **b): return a, k, b", "assert f(1, 2, k=3, z=4) == ((1, 2), 3, {'z': 4})"),
    ("def f(x): return float('nan')", "assert f(1) != f(1)"),
]


def plain(program: str, tests: str) -> bool:
    """Whether the file of both runs to its end."""
    command = [sys.executable, "-I", "-S", "-c", f"{program}\n{tests}\nimport os\nos.write(1, b'end')"]
    return subprocess.run(command, capture_output=True, check=False).stdout == b"end"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(VALUES)))
def test_values_cross_as_they_are(number: int, runner: PythonTests) -> None:
    program, tests = VALUES[number]
    assert plain(program, tests)
    assert outcome(runner, program, {"tests": tests}) == "pass"


def drawn_expression(draw: random.Random, depth: int = 3) -> str:
    """An expression of a and b, numbers or what they make."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(["a", "b", "1", "2.5", "'s'", "None", "[a]", "(b, a)", "{a: b}", "{a, 1}"])
    one, other = (drawn_expression(draw, depth - 1) for _ in range(2))
    shapes = ["({0} + {1})", "({0} * {1})", "({0} // {1})", "[{0}, {1}]", "({0}, {1})", "({0} == {1})", "str({0})"]
    shapes += ["sorted([{0}, {1}])", "len({0})", "({0} if {1} else {0})", "{{'k': {0}, a: {1}}}", "max({0}, {1})"]
    return draw.choice(shapes).format(one, other)


@pytest.mark.slow
def test_drawn_programs_have_the_verdict_of_a_plain_run(runner: PythonTests) -> None:
    draw, verdicts = random.Random(5), []
    while len(verdicts) < 40:
        right = drawn_expression(draw)
        wrong = draw.choice([right, right, drawn_expression(draw)])
        calls = [(draw.randint(-2, 3), draw.randint(-2, 3)) for _ in range(3)]
        program = f"def f(a, b): return {wrong}"
        tests = "\n".join(f"assert f({a}, {b}) == (lambda a, b: {right})({a}, {b})" for a, b in calls)
        verdicts.append((plain(program, tests), job_of({"tests": tests}, program)))
    found = runner.outcomes([job for _, job in verdicts])
    assert found == ["pass" if is_right else "fail" for is_right, _ in verdicts]
    assert {"pass", "fail"} == set(found)


@pytest.mark.slow
def test_every_completion_has_one_outcome_that_is_a_metric(runner: PythonTests) -> None:
    quick = PythonTests(PythonTestsOptions(timeout=0.5, allow_unisolated=True))
    texts = [f"```python\n{RIGHT}```", "def f(x): return 0", "while True: pass"]
    found = python_tests(completions=texts, tests=[SQUARES["tests"]] * 3, runner=quick)
    assert [each.pop("score") for each in found] == [1, 0, 0]
    assert [[name for name in OUTCOMES if each[name]] for each in found] == [["pass"], ["fail"], ["timeout"]]


@pytest.mark.slow
def test_a_run_counts_the_outcomes_and_refuses_rows_before_it_samples() -> None:
    choices = {"reward": "python_tests", "python_tests.allow_unisolated": True, "data.eval_fraction": 0.0}
    rows = [{"prompt": f"Q{n}", **SQUARES, "solution": RIGHT} for n in range(4)]
    assembly: Any = runs.begin("grpo", roles={}, choices=choices, train_dataset=rows)
    (batch, *_) = runs.first_step(assembly.loop.task, assembly.loop.model)
    assert batch["metrics"]["rewards/fail/mean"] == 1
    assert all(batch["metrics"][f"rewards/{name}/mean"] == 0 for name in OUTCOMES if name != "fail")
    rows[2]["tests"] = "assert f(2) =="
    with pytest.raises(DataError, match="do not compile"):
        runs.begin("grpo", roles={}, choices=choices, train_dataset=rows)
