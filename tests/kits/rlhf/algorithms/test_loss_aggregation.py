from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.loss_aggregation import LossAggregation, aggregate, loss_denominator
from tests.kits.rlhf.algorithms.sequences import LENGTHS, MASK, numbers

MODES = get_args(LossAggregation)


def whole(values: Tensor, mask: Tensor, mode: LossAggregation) -> float:
    return float(aggregate(values, mask, mode, loss_denominator(mask, mode, longest=8)))


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_what_its_name_says(mode: LossAggregation) -> None:
    values = numbers(0)
    rows = [values[row, :length] for row, length in enumerate(LENGTHS)]
    wanted = {
        "token-mean": sum(row.sum() for row in rows) / sum(LENGTHS),
        "seq-mean-token-mean": sum(row.mean() for row in rows) / len(rows),
        "seq-mean-token-sum": sum(row.sum() for row in rows) / len(rows),
        "constant": sum(row.sum() for row in rows) / (len(rows) * 8),
    }
    assert whole(values, MASK, mode) == pytest.approx(float(wanted[mode]), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_share_one_denominator(mode: LossAggregation, size: int) -> None:
    values = numbers(1)
    denominator = sum(loss_denominator(part, mode, 8) for part in MASK.split(size))
    pairs = zip(values.split(size), MASK.split(size), strict=True)
    parts = sum(float(aggregate(part, mask, mode, denominator)) for part, mask in pairs)
    assert parts == pytest.approx(whole(values, MASK, mode), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_neither_the_order_nor_more_padding_matters(mode: LossAggregation) -> None:
    values, order = numbers(2), torch.tensor([2, 0, 3, 1])
    wider = torch.cat([values, torch.full((4, 5), float("inf"), dtype=torch.float64)], dim=1)
    wider_mask = torch.cat([MASK, torch.zeros(4, 5, dtype=torch.bool)], dim=1)
    assert whole(values[order], MASK[order], mode) == pytest.approx(whole(values, MASK, mode), abs=1e-12)
    assert whole(wider, wider_mask, mode) == pytest.approx(whole(values, MASK, mode), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_sequence_counts_for_nothing(mode: LossAggregation) -> None:
    values, mask = numbers(3), MASK.clone()
    mask[1] = False
    kept = torch.tensor([0, 2, 3])
    assert whole(values, mask, mode) == pytest.approx(whole(values[kept], MASK[kept], mode), abs=1e-12)


def test_a_mean_of_means_weighs_the_tokens_of_a_short_micro_batch_more() -> None:
    # 16 tokens as 10 and 6: the figures of the issue that many projects had (verl #4711 logged them so for months).
    values = torch.arange(16, dtype=torch.float64)
    mean_of_means = (values[:10].mean() + values[10:].mean()) / 2
    rows = torch.stack([values[:10], torch.cat([values[10:], torch.zeros(4, dtype=torch.float64)])])
    mask = torch.arange(10) < torch.tensor([[10], [6]])
    assert whole(rows, mask, "token-mean") == pytest.approx(float(values.mean()), abs=1e-12)
    assert abs(float(mean_of_means) - whole(rows, mask, "token-mean")) > 0.5


def test_long_responses_weigh_as_the_mode_says() -> None:
    mask = torch.arange(1000) < torch.tensor([[10], [1000]])

    def weights(mode: LossAggregation) -> list[float]:
        values = torch.zeros(2, 1000, dtype=torch.float64, requires_grad=True)
        aggregate(values, mask, mode, loss_denominator(mask, mode, 1000)).backward()
        assert values.grad is not None
        return [float(values.grad[0, 0]), float(values.grad[1, 0])]

    assert weights("seq-mean-token-mean") == pytest.approx([0.05, 0.0005])
    assert weights("token-mean") == pytest.approx([1 / 1010, 1 / 1010])
    assert weights("constant") == pytest.approx([0.0005, 0.0005])
