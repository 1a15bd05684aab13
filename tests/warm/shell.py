"""A shell in which the checkout's `kitforge` is the one on the path, and starts at once."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[[list[str], Path], str]
SECONDS = 600
CLIENT = Path(__file__).with_name("client.py")


# What torch.compile imports when it is first called, in several seconds.
COMPILER = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")


@contextmanager
def serving(python: list[str], *modules: str) -> Iterator[Path]:
    """Where a process listens that has imported everything, and these modules."""
    # The path of a socket may have a hundred letters only, which pytest's own folders can exceed.
    with tempfile.TemporaryDirectory(prefix="kitforge-") as folder:
        path = Path(folder) / "socket"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [*python, "-m", "tests.warm.server", str(path), *modules]
        # It ends with its standard input, also where these tests are killed.
        with subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.PIPE) as process:
            while not path.exists():
                assert process.poll() is None
                time.sleep(0.02)
            yield path
            process.communicate()


@pytest.fixture(scope="session")
def warm() -> Iterator[Path]:
    """Where the process listens that has imported everything."""
    with serving([sys.executable]) as path:
        yield path


@pytest.fixture(scope="session")
def warm_compiler(warm: Path) -> Iterator[Path]:
    """Where a copy of it listens that has imported torch's compiler as well."""
    with serving([sys.executable, "-S", "-E", str(CLIENT), str(warm)], *COMPILER) as path:
        yield path


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Path:
    """A folder with `kitforge`, `python` and `python3` that start at once."""
    shims = tmp_path_factory.mktemp("bin")
    python = shlex.quote(sys.executable)
    call = f"exec {python} -S -E {shlex.quote(str(CLIENT))} {warm}"
    # Torchrun starts its ranks with -u.
    scripts = f'[ "$1" = -u ] && shift; case "$1" in *.py|-m) {call} "$@" ;; *) exec {python} "$@" ;; esac'
    for name, body in (("kitforge", f'{call} -m kitforge "$@"'), ("python", scripts), ("python3", scripts)):
        shim = shims / name
        shim.write_text(f"#!/bin/sh\n{body}\n")
        shim.chmod(0o755)
    return shims


@pytest.fixture
def may_shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets runs that are told to be long end early."""
    monkeypatch.setenv("KITFORGE_TEST_MAY_SHORTEN", "1")


@pytest.fixture(scope="session")
def run(shims: Path) -> Run:
    """Run a command in a folder and return what it prints; a failure shows the whole of it."""

    def run_here(command: list[str], folder: Path) -> str:
        environment = {**os.environ, "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
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
