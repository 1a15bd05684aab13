"""Runs that are opened by several files."""

from pathlib import Path

import pytest

from tests.kits.recommender.runs import run

DELTAS = {"trainer.checkpoint_every": 2, "trainer.incremental_checkpoints": 9, "trainer.save_total_limit": 9}


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that scores and two that retrieve, with a whole checkpoint and those of what changed since."""
    folder = tmp_path_factory.mktemp("runs")
    for family in ("wide_deep", "two_tower", "sasrec"):
        run(folder / family, family, DELTAS)
    return {family: folder / family for family in ("wide_deep", "two_tower", "sasrec")}
