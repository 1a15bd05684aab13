"""Values brought to mean 0 and variance 1 over the whole step, every rank's tokens included."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

# Adds up 0-dim values by name over all ranks.
AllReduceSums = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
EPSILON = 1e-8


def single_rank_sum(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The sum over one rank."""
    return values


def masked_whiten(
    values: Tensor, mask: Tensor, *, all_reduce: AllReduceSums = single_rank_sum, shift_mean: bool = True
) -> Tensor:
    """`values` [B, T] over their deviation where the mask is true, 0 elsewhere; without `shift_mean` the mean stays.

    Mean and variance (n - 1) are those of all true tokens of all ranks. Fewer than two tokens have no deviation: they
    are left at 0, or as they are where the mean stays.
    """
    kept = torch.where(mask, values, 0.0)
    found = all_reduce({"count": mask.sum().to(values.dtype), "sum": kept.sum()})
    count = found["count"].to(values)
    mean = found["sum"].to(values) / count.clamp(min=1)
    centred = torch.where(mask, values - mean, 0.0)
    squares = all_reduce({"squares": centred.square().sum()})["squares"].to(values)
    if count < 2:
        return centred if shift_mean else kept
    whitened = centred * torch.rsqrt(squares / (count - 1) + EPSILON)
    return whitened if shift_mean else torch.where(mask, whitened + mean, 0.0)
