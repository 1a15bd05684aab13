"""What every test shares: repeatable examples from Hypothesis, a skip where there is no accelerator, one small run,
and a shell that starts at once."""

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
from tests.warm.shell import run, warm

__all__ = ["run", "warm"]

# No deadline, since cores are shared; no database, since a run must not depend on the one before.
settings.register_profile("kitforge", deadline=None, derandomize=True, database=None)
settings.load_profile("kitforge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator here"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is marked `alone` runs in a process that ran nothing else."""
    if pyfuncitem.get_closest_marker("alone") is None or "KITFORGE_TEST_ALONE" in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
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
