"""Recommenders on several ranks: rows live on all of them, and the losses are those of one process."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge.core.parallel.config import ParallelConfig
from kitforge.kits.recommender.metrics import (
    CUTS,
    ClickMetrics,
    RankingMetrics,
    all_reduce_click_metrics,
    all_reduce_ranking_metrics,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.training import Losses, TestRendezvous
from tests.kits.recommender.runs import FAMILIES, in_folder, numbers, run
from tests.kits.recommender.test_dataset import endless, online
from tests.kits.recommender.test_negatives import trained

pytestmark = pytest.mark.slow

MESHES: dict[str, dict[str, Any]] = {
    "data": {"parallel.data": 2, "cache.placement": "row"},
    # Tables as small as these go to all ranks where nobody says otherwise.
    "shard": {"parallel.shard": 2},
    "both": {"parallel.data": 2, "parallel.shard": 2, "cache.placement": "table"},
    "cached": {"parallel.data": 2, "cache.placement": "row", "cache.device_rows": 40, "cache.prefetch_batches": 2},
}
PRODUCT = list(itertools.product(FAMILIES, MESHES))
SAMPLE = [("din", "both"), ("wide_deep", "shard"), ("two_tower", "data"), *random.Random(1).sample(PRODUCT, 2)]
CASES = PRODUCT if "KITFORGE_PROVE" in os.environ else list(dict.fromkeys(SAMPLE))


@pytest.mark.prove
@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_losses_on_ranks_are_those_of_one_process(tmp_path: Path, family: str, mesh: str) -> None:
    # 33 samples are shared unevenly, and micro-batches of 10 leave some ranks without a last one.
    choices = {"data.batch_size": 33, "trainer.micro_batch_size": 10, "trainer.max_steps": 3}
    one, _ = run(tmp_path / "one", family, choices)
    split = {**choices, **MESHES[mesh]}
    num_ranks = 4 if mesh == "both" else 2
    for told in run_ranks(num_ranks, in_folder, tmp_path / "many", family, split):
        names = {name for line in one.lines for name in line if name.startswith("eval/") or name == "loss"}
        for name in names:
            assert numbers(told, name) == pytest.approx(numbers(one, name), abs=2e-6)
        assert numbers(told, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)


def test_a_run_goes_on_under_other_ranks_tiers_and_placements(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole")
    first, _ = run(tmp_path / "parts", stop_at=3)
    placement = {"wide": "table", "deep_4": "column"}
    later = {"parallel.data": 2, "cache.device_rows": 30, "cache.placement": placement, "resume": "auto"}
    second = run_ranks(2, in_folder, tmp_path / "parts", "wide_deep", later)[0]
    assert numbers(first, "loss") + numbers(second, "loss") == pytest.approx(numbers(whole, "loss"), abs=2e-6)


def sampled(rank: int, folder: Path, choices: dict[str, Any]) -> Losses:
    told: Losses = trained(folder, **choices)[0]
    return told


def test_negatives_on_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    choices = {"data.batch_size": 33, "trainer.micro_batch_size": 10, "data.negatives.negative_sampling": "popularity"}
    one = sampled(0, tmp_path / "one", choices)
    for told in run_ranks(2, sampled, tmp_path / "many", {**choices, "parallel.data": 2, "cache.placement": "row"}):
        for name in ("loss", "eval/loss", "eval/auc"):
            assert numbers(told, name) == pytest.approx(numbers(one, name), abs=2e-6)


def streamed(rank: int, folder: Path) -> Losses:
    told, _ = online(folder, endless(), **{"trainer.max_steps": 3, "parallel.data": 2, "cache.prefetch_batches": 2})
    return told


def test_rows_that_come_once_are_shared_by_ranks_that_all_see_them(tmp_path: Path) -> None:
    one, _ = online(tmp_path / "one", endless(), **{"trainer.max_steps": 3})
    for told in run_ranks(2, streamed, tmp_path / "many"):
        assert numbers(told, "loss") == pytest.approx(numbers(one, "loss"), abs=2e-6)
        assert numbers(told, "samples") == numbers(one, "samples")


def clicks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random_ = np.random.default_rng(3)
    logits = np.round(random_.normal(size=500), 1)
    return logits, (random_.random(500) < 0.3).astype(np.float32), random_.integers(0, 40, 500)


def measured(rank: int, num_ranks: int, exact_rows: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a rank's uneven share of fixed clicks and places, put together with those of the others."""
    world = TestRendezvous(ParallelConfig(data=num_ranks)).init_process_group()
    bounds = [0, 123, 273, 423][:num_ranks] + [500]
    share = slice(bounds[rank], bounds[rank + 1])
    metrics, places = ClickMetrics(is_grouped=True, exact_rows=exact_rows), RankingMetrics(sorted({*CUTS, 7}))
    metrics.add(*(column[share] for column in clicks()))
    places.add(clicks()[2][share])
    return all_reduce_click_metrics(metrics, world), all_reduce_ranking_metrics(places, 0.0, world)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_metrics_are_to_the_bit_those_of_one_process(num_ranks: int) -> None:
    for exact_rows in (10**6, 100):
        expected = measured(0, 1, exact_rows)
        assert run_ranks(num_ranks, measured, num_ranks, exact_rows) == [expected] * num_ranks
