from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.whitening import masked_whiten
from tests.kits.rlhf.algorithms.sequences import MASK, numbers


def test_true_tokens_have_mean_zero_and_variance_one_and_others_are_zero() -> None:
    whitened = masked_whiten(numbers(0) * 7 + 3, MASK)
    assert abs(float(whitened[MASK].mean())) < 1e-12
    assert abs(float(whitened[MASK].var()) - 1) < 1e-8
    assert torch.equal(whitened[~MASK], torch.zeros_like(whitened[~MASK]))


def test_without_a_shift_the_mean_stays() -> None:
    values = numbers(1) + 2
    whitened = masked_whiten(values, MASK, shift_mean=False)
    assert abs(float(whitened[MASK].mean() - values[MASK].mean())) < 1e-12
    assert abs(float(whitened[MASK].var()) - 1) < 1e-8


class Ranks:
    """Several ranks in one process: what each would hand to the sum is known, as the others' is computed here."""

    def __init__(self, values: list[Tensor], masks: list[Tensor]) -> None:
        self.values, self.masks = values, masks

    def total(self, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kept = torch.cat([values[mask] for values, mask in zip(self.values, self.masks, strict=True)])
        sums = {
            "count": torch.tensor(float(len(kept))),
            "sum": kept.sum(),
            "squares": (kept - kept.mean()).square().sum(),
        }
        return {name: sums[name] for name in found}


def test_ranks_whiten_as_one() -> None:
    values = numbers(2) * torch.tensor([[1.0], [1.0], [9.0], [9.0]], dtype=torch.float64)
    ranks = Ranks(list(values.split(2)), list(MASK.split(2)))
    found = [
        masked_whiten(own, mask, all_reduce=ranks.total) for own, mask in zip(ranks.values, ranks.masks, strict=True)
    ]
    assert torch.allclose(torch.cat(found), masked_whiten(values, MASK), atol=1e-12, rtol=0)


def test_less_than_two_tokens_are_left_alone() -> None:
    mask = torch.tensor([[True, False]])
    value = torch.tensor([[3.0, float("nan")]])
    assert masked_whiten(value, mask).tolist() == [[0.0, 0.0]]
    assert masked_whiten(value, mask, shift_mean=False).tolist() == [[3.0, 0.0]]
    assert masked_whiten(value, ~mask & mask).tolist() == [[0.0, 0.0]]
