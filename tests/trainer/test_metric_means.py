"""Sums over all batches, divided once."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.foundation.types import Sums
from kitforge.trainer.metric_means import weighted_means
from tests.trainer import tiny


def sums(batch: list[float]) -> Sums:
    return {"loss": torch.tensor(sum(batch)), "hits": torch.tensor(float(len(batch)))}


def counts(batch: list[float]) -> Sums:
    return {"loss": torch.tensor(len(batch)), "hits": torch.tensor(2 * len(batch))}


def test_batches_weigh_what_they_hold() -> None:
    assert weighted_means([[1.0, 2.0, 3.0], [10.0]], sums, counts) == {"loss": 4.0, "hits": 0.5}


def test_what_all_ranks_found_is_divided_by_what_all_ranks_hold() -> None:
    def over_ranks(own: Mapping[str, Tensor]) -> Sums:
        return {name: 3 * value for name, value in own.items()}

    assert weighted_means([[1.0, 2.0, 3.0], [10.0]], sums, counts, over_ranks) == {"loss": 4.0, "hits": 0.5}


def test_a_sum_without_a_count_of_its_own_is_divided_by_that_of_the_loss() -> None:
    assert weighted_means([[1.0, 3.0]], sums, lambda batch: {"loss": torch.tensor(len(batch))})["hits"] == 1.0


def test_small_sums_are_not_lost_beside_large_ones() -> None:
    batches = [[2.0**30], *[[1.0]] * 64]
    assert weighted_means(batches, sums, counts)["loss"] == (2.0**30 + 64) / 65


def test_a_mean_of_nothing_is_no_number_and_one_of_less_than_one_is_the_mean() -> None:
    tensors = {"loss": torch.tensor(0.0), "hits": torch.tensor(0.1)}
    found = weighted_means([1], lambda _: tensors, lambda _: {"loss": torch.tensor(0.0), "hits": torch.tensor(0.5)})
    assert math.isnan(found["loss"]) and found["hits"] == pytest.approx(0.2)


def test_nothing_to_evaluate_gives_no_metrics() -> None:
    assert weighted_means([], sums, counts) == {}


class SinglePrecision(Tensor):
    """A value on a device that has no float64, as Apple's have none."""

    def double(self) -> Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64")


def test_devices_without_float64_evaluate_as_well() -> None:
    value = torch.tensor(3.0).as_subclass(SinglePrecision)
    assert weighted_means([2], lambda _: {"loss": value}, lambda count: {"loss": torch.tensor(count)})["loss"] == 1.5


def test_evaluation_drops_nothing_out(tmp_path: Path, corpus: Path) -> None:
    choices = {"trainer.eval_first": True, "trainer.max_steps": 1}
    for name, dropout in (("with", dict.fromkeys(tiny.DROPOUT, 0.5)), ("without", {})):
        tiny.run(tmp_path / name, corpus, {"model": tiny.GPT2 | dropout, **choices})
    first, other = (tiny.records(tmp_path / name, "eval")[0]["eval/loss"] for name in ("with", "without"))
    assert first == other
    # The step between them shows that there is something to drop.
    first, other = (tiny.records(tmp_path / name, "train")[0]["loss"] for name in ("with", "without"))
    assert first != other
