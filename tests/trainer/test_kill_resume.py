"""SIGKILL at random instants, also while saving, and `resume=auto` until the end: nothing tells that it happened."""

import os
from pathlib import Path

import pytest

from tests.trainer import tiny
from tests.trainer.kill_resume import kill_again_and_again

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
    assert kill_again_and_again(folder, corpus, kind, seed) >= 1
    tiny.assert_same(folder, tmp_path / "whole")
