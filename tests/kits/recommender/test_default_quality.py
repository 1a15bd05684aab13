"""By default the families that combine embeddings do not memorise a small log of many ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.config import with_size_defaults
from tests.differential.drawn import WHOLE
from tests.kits.recommender.runs import by_default

KIT = TASKS["recommendation"]
NUM_TRAINED, NUM_HELD_OUT = 4000, 1000


def many_ids() -> list[dict[str, Any]]:
    """Rows whose click depends on a number alone, beside 24 columns of ids that say nothing."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=NUM_TRAINED + NUM_HELD_OUT)
    ids = random.integers(0, 100, (len(numbers), 24))
    clicks = random.random(len(numbers)) < 1 / (1 + np.exp(1 - 0.45 * numbers))
    return [
        {"number": number, "click": int(click), **{f"id_{place}": f"v{value}" for place, value in enumerate(values)}}
        for number, click, values in zip(numbers, clicks, ids, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("family", ["dcn_v2", "deepfm", "dlrm"][: None if WHOLE else 1])
def test_a_family_by_default_is_at_least_as_good_as_the_base_rate(tmp_path: Path, family: str) -> None:
    rows = many_ids()
    found = by_default(tmp_path, family, rows, NUM_TRAINED)
    rate = np.mean([row["click"] for row in rows[:NUM_TRAINED]])
    clicks = np.array([row["click"] for row in rows[NUM_TRAINED:]])
    constant = -np.mean(clicks * np.log(rate) + (1 - clicks) * np.log(1 - rate))
    assert found["eval/loss"] <= constant


@pytest.mark.parametrize(("rows", "epochs"), [(100, 2.0), (8000, 2.0), (200_000, 2.0), (10**6, 2.0), (10**6 + 1, 1.0)])
@pytest.mark.parametrize("family", ["dlrm", "dcn_v2", "deepfm", "din"])
def test_interactions_are_learned_in_two_epochs_at_most(family: str, rows: int, epochs: float) -> None:
    assert with_size_defaults(KIT.read_options({}), rows, family).trainer.epochs == epochs


def test_sampled_negatives_differ_by_epoch_and_are_learned_in_four() -> None:
    options = KIT.read_options({"data": {"negatives": {"num_negatives": 4}}})
    assert with_size_defaults(options, 8000, "din").trainer.epochs == 4


@pytest.mark.parametrize("given", [{"epochs": 7.0}, {"max_steps": 3}])
def test_a_given_length_wins_over_the_family_s_own(given: dict[str, Any]) -> None:
    options = KIT.read_options({"trainer": given})
    assert with_size_defaults(options, 8000, "dlrm").trainer == options.trainer
