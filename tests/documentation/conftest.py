"""A shell in which the checkout's `kitforge` is the one on the path."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.documentation.markdown import ROOT

Run = Callable[[list[str], Path], str]
SECONDS = 600


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command in a folder and return what it prints; a failure shows the whole of it."""
    shims = tmp_path_factory.mktemp("bin")
    for name, module in (("kitforge", "-m kitforge"), ("python", ""), ("python3", "")):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run_here(command: list[str], folder: Path) -> str:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert result.returncode == 0, f"{shlex.join(command)} ended with {result.returncode}:\n{result.stdout}"
        return result.stdout

    return run_here
