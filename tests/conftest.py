"""What every test shares: repeatable examples from Hypothesis, a skip where there is no accelerator, one small run,
and a shell that starts at once."""

import atexit
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Lets kernels for GPUs run on CPU tensors. Triton reads it while it is imported.
if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.small_run import write_run
from tests.warm.shell import CLIENT, may_shorten, run, shims, warm, warm_compiler

__all__ = ["may_shorten", "run", "shims", "warm", "warm_compiler"]

# A fifth of the time of collection would go into looks for garbage among what stays; it is on again once all is there.
gc.disable()

# No deadline, since cores are shared; no database, since a run must not depend on the one before.
settings.register_profile("kitforge", deadline=None, derandomize=True, database=None)
settings.load_profile("kitforge")


# Tests of half a minute; they begin early, so that no worker waits for another at the end.
LONG = {"test_planted.py", "test_gpu_check.py", "test_demo.py", "test_real_weights.py"}
# Tests that fork this process hundreds of times come before those that make it large: a fork costs 85 ms for each GB.
FORKING = {"distributed", "test_killed.py", "test_kill_resume.py", "test_role_ranks.py", "test_sharded.py", "verify"}


def _is_left_for_prove(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("only") for mark in item.iter_markers("prove"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "KITFORGE_PROVE" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if _is_left_for_prove(item)])
        items[:] = [item for item in items if not _is_left_for_prove(item)]
    items.sort(key=lambda item: (FORKING.isdisjoint(item.path.parts), item.path.name not in LONG))
    for item in items:
        if isinstance(item, pytest.Function) and _is_to_run_alone(item):
            item.fixturenames.append("warm_compiler")
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


def pytest_collection_finish() -> None:
    """What collection has made stays until the end: a look for garbage among it takes most of a second, and a forked
    rank that looks makes all of it its own."""
    gc.enable()
    # Looks for garbage after every 700 new objects, Python's choice, were a tenth of all processor time.
    gc.set_threshold(20_000)
    gc.collect()
    gc.freeze()
    # Libraries that count at the end what is left find it freed, but pytest does not look through all of it before.
    atexit.register(gc.unfreeze)


# glibc's only: it gives freed memory back to the system.
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What the tests of a file have freed goes back: kept, a real model of one file is 1.6 GB of page tables for every
    process that is forked afterwards."""
    if nextitem is None or nextitem.path != item.path:
        # What a file leaves stays, mostly modules; later looks for garbage pass over it, those of `gc.get_objects` too.
        gc.collect()
        gc.freeze()
        TRIM(0)


def _is_to_run_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None and "KITFORGE_TEST_ALONE" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `alone` runs in a process that ran nothing else, a copy of the one that has torch's
    compiler."""
    if not _is_to_run_alone(pyfuncitem):
        return None
    # The process holds modules in whose assertions pytest can no longer look.
    ignored = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    pytest_alone = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, pyfuncitem.nodeid]
    command = [sys.executable, "-S", "-E", str(CLIENT), str(pyfuncitem.funcargs["warm_compiler"]), *pytest_alone]
    environment = {**os.environ, "KITFORGE_TEST_ALONE": "1"}
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return True


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, to be read and never written."""
    return write_run(tmp_path_factory.mktemp("small"))
