"""SIGKILL at random instants, also while saving, and `resume=auto` until the end: nothing tells that it happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import tiny

CHECKOUT = Path(__file__).parents[2]
SEEDS = range(10 if os.environ.get("KITFORGE_PROVE") else 1)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(
    tmp_path: Path, corpus: Path, kind: str, seed: int
) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.trainer.killed", str(folder), str(corpus), kind, str(seed)]
    done = subprocess.run(command, check=True, cwd=CHECKOUT, timeout=300, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) >= 1
    tiny.assert_same(folder, tmp_path / "whole")


