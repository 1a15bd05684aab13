"""The figures of the contracts of learning: NaN on one side is no equality."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kitforge.verify.learning import _furthest, check_micro_batches, distance_of


@pytest.mark.parametrize(("got", "wanted"), [(math.nan, 1.0), (1.0, math.nan)])
def test_a_metric_that_is_nan_at_one_batch_size_alone_is_infinitely_far(got: float, wanted: float) -> None:
    assert _furthest({"loss": got, "accuracy": 0.5}, {"loss": wanted, "accuracy": 0.5}) == math.inf


def test_a_metric_that_is_nan_at_both_is_left_out_and_nothing_is_not_equal() -> None:
    assert _furthest({"auc": math.nan, "loss": 1.0}, {"auc": math.nan, "loss": 1.0}) == 0.0
    assert _furthest({"auc": math.nan}, {"auc": math.nan}) == math.inf
    assert _furthest({"loss": 1.0}, {"other": 1.0}) == math.inf


def test_tensors_with_nan_or_other_names_are_not_near() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert math.isnan(distance_of({"a": nan, "b": one}, {"a": one, "b": one}))
    assert distance_of({"a": one}, {"b": one}) == math.inf


def test_weights_that_do_not_move_are_no_equal_steps() -> None:
    run = SimpleNamespace(metrics={"loss": 1.0})

    def assembled(_folder: str, _changes: Any, model: nn.Module) -> Any:
        return nullcontext(SimpleNamespace(loop=SimpleNamespace(model=model), train=lambda: run))

    case: Any = SimpleNamespace(network=lambda: (nn.Linear(2, 2), True), has=lambda _: False, run=assembled)
    assert not check_micro_batches(case).is_held
