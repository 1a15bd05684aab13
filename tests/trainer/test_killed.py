"""SIGKILL at random instants, also while saving, and `resume=auto` until the end: nothing tells that it happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer import tiny

CHECKOUT = Path(__file__).parents[2]
WHOLE = "KITFORGE_PROVE" in os.environ
SEEDS = range(10 if WHOLE else 1)
KINDS = tiny.KINDS if WHOLE else ("muon in bf16", "gpt2 with dropout and micro-batches", "packed documents")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(
    tmp_path: Path, corpus: Path, kind: str, seed: int
) -> None:
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.trainer.killed", str(folder), str(corpus), kind, str(seed)]
    done = subprocess.run(command, check=True, cwd=CHECKOUT, timeout=300, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) >= 1
    tiny.assert_same(folder, tmp_path / "whole")
