"""Loops compiled by two processes at once: one of them compiles, and what is kept for one signature is never called for
another."""

import contextlib
import importlib
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from kitforge.core.kernels.cpu_engine import numba_runtime
from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, run_on_threads
from tests.patience import PATIENCE

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function of a file with a folder of its own for what is compiled."""
    source = tmp_path / f"loops_of_{tmp_path.name}.py"
    source.write_text("def half(value):\n    return value / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    function: Callable[..., Any] = importlib.import_module(source.stem).half
    return function


def compile_at_once(function: Callable[..., Any], values: list[object], seconds: float, reading: int = 2) -> int:
    """A process for each value compiles the function for it; all read the index for the `reading`-th time before one of
    them writes it, if the lock lets them: they wait `seconds` for one another. How many compiled it themselves."""
    arrived, num_compiled = FORK.Barrier(len(values)), FORK.Value("i", 0)
    read = IndexDataCacheFile._load_index
    num_reads = [0]

    def read_together(file: Any) -> Any:
        overloads = read(file)
        num_reads[0] += 1
        if num_reads[0] == reading:  # the first looks for what was kept, the second is about to keep
            with contextlib.suppress(Exception):
                arrived.wait(seconds)
        return overloads

    def use(value: object) -> None:
        IndexDataCacheFile._load_index = read_together
        made = compiled(function)
        made(value)
        with num_compiled:
            num_compiled.value += sum(made.stats.cache_misses.values())

    processes = [FORK.Process(target=use, args=(value,)) for value in values]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * len(values)
    return num_compiled.value


def test_two_signatures_keep_two_files(half: Callable[..., Any], tmp_path: Path) -> None:
    compile_at_once(half, [3, 2.5], seconds=0.2)
    assert len(list(tmp_path.rglob("*.nbc"))) == 2
    again = compiled(half)
    assert (again(3), again(2.5)) == (1.5, 1.25)
    assert sum(again.stats.cache_hits.values()) == 2


def test_compilation_is_said_once_and_loading_is_not(
    half: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for _ in range(2):
        numba_runtime._say_once.cache_clear()
        made = compiled(half)
        assert (made(3), made(2.5)) == (1.5, 1.25)
        said.append(capsys.readouterr().err.count("compiling loops"))
    assert said == [1, 0]


@pytest.mark.parametrize("first", ["python", "loop"])
def test_what_a_loop_calls_can_be_called_as_well(half: Callable[..., Any], tmp_path: Path, first: str) -> None:
    # The second time both are loaded from their files.
    for _ in range(2):
        part = compiled(half)
        calls = [lambda part=part: part(3.0), lambda part=part: compiled(lambda value: part(value) + 1)(3.0)]
        found = [call() for call in (calls if first == "python" else reversed(calls))]
        assert sorted(found) == [1.5, 2.5]
    names = [path.name.partition("loops_of")[0] for path in tmp_path.rglob("*.nbc")]
    assert sorted(names) == ["", "assembly."]


LOOPS = """
from kitforge.core.kernels.cpu_engine.numba_runtime import compiled

def made(step):
    return compiled(lambda value: value + step)

up, down = made(1.0), made(-1.0)

above = compiled(lambda value: up(value))
below = compiled(lambda value: down(value))

first = compiled(lambda value: above(value))
second = compiled(lambda value: below(value))
both = compiled(lambda value: (above(value), below(value)))
"""


def test_functions_of_one_name_from_two_processes_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / f"loops_of_{tmp_path.name}.py"
    source.write_text(LOOPS)
    monkeypatch.syspath_prepend(tmp_path)
    loops = importlib.import_module(source.stem)
    for loop in (loops.first, loops.second):
        process = FORK.Process(target=loop, args=(3.0,))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert loops.both(3.0) == (4.0, 2.0)


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: everyone compiles without asking."""
    monkeypatch.setattr(numba_runtime, "_compile_once", lambda compile, cache, signature: compile(signature))


def test_one_of_two_processes_compiles_for_both(half: Callable[..., Any]) -> None:
    assert compile_at_once(half, [2.5, 3.5], seconds=0.2, reading=1) == 1


def test_planted_without_a_lock_both_compile(half: Callable[..., Any], unlocked: None) -> None:
    assert compile_at_once(half, [2.5, 3.5], seconds=60, reading=1) == 2


def test_planted_without_a_lock_one_signature_takes_the_file_of_the_other(
    half: Callable[..., Any], tmp_path: Path, unlocked: None
) -> None:
    compile_at_once(half, [3, 2.5], seconds=60)
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_a_call_on_threads_returns_once_all_have_finished() -> None:
    together, finished = threading.Barrier(3), []

    def work() -> None:
        together.wait(PATIENCE)
        finished.append(threading.get_ident())

    for _ in range(3):
        run_on_threads(work, 3)
    assert len(finished) == 9 and len(set(finished)) == 3


def test_a_thread_that_is_not_free_is_not_waited_for() -> None:
    begun, may_end, calls = threading.Event(), threading.Event(), []

    def keep_busy() -> None:
        if threading.current_thread() is not caller:
            begun.set()
            may_end.wait(PATIENCE)
        else:
            begun.wait(PATIENCE)

    caller = threading.Thread(target=run_on_threads, args=(keep_busy, 2))
    caller.start()
    begun.wait(PATIENCE)
    run_on_threads(lambda: calls.append(1), 2)
    may_end.set()
    caller.join(PATIENCE)
    run_on_threads(lambda: calls.append(2), 1)
    assert calls == [1, 2]


def test_what_another_thread_raises_is_raised() -> None:
    together, own = threading.Barrier(2), threading.get_ident()

    def work() -> None:
        together.wait(PATIENCE)
        if threading.get_ident() != own:
            raise ValueError("there")

    for _ in range(2):
        with pytest.raises(ValueError, match="there"):
            run_on_threads(work, 2)
